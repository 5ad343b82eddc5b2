// Gradient accumulation over a list of tensors: gpipe_fast::accumulate_(accumulators, gradients).
#pragma once

#include <ATen/core/Tensor.h>

namespace gpipe_fast {

// Refuses pairs that accumulate_ cannot add: lists of different lengths, a gradient whose shape or device
// differs from its accumulator's, a gradient whose dtype does not cast to it.
void check_pairs(at::TensorList accumulators, at::TensorList gradients);

// Refuses an accumulator that shares memory with another tensor of the call: pairs are added in no
// particular order. Compares the address ranges that the tensors span; O(n log n).
void check_disjoint(at::TensorList accumulators, at::TensorList gradients);

}  // namespace gpipe_fast
