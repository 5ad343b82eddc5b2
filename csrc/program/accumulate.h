// Gradient accumulation over a list of tensors: gpipe_fast::accumulate_(accumulators, gradients), and
// gpipe_fast::_accumulate_, the same for programs, whose tensors were checked when they were lowered.
#pragma once

#include <ATen/core/Tensor.h>

namespace gpipe_fast {

// Refuses pairs that accumulate_ cannot add: lists of different lengths, a gradient whose shape or device
// differs from its accumulator's, a gradient whose dtype does not cast to it.
void check_pairs(at::TensorList accumulators, at::TensorList gradients);

// Refuses an accumulator that shares memory with another tensor of the call: pairs are added in no
// particular order. Compares the address ranges that the tensors span; O(n log n).
void check_disjoint(at::TensorList accumulators, at::TensorList gradients);

// gpipe_fast::_accumulate_: accumulator += gradient for every pair, of what the two above let through. Checks nothing,
// and tells autograd nothing. On CUDA up to 128 pairs of equal dtypes and strides are one launch, which can be captured.
void accumulate_unchecked(at::TensorList accumulators, at::TensorList gradients);

}  // namespace gpipe_fast
