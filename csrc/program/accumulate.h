// Gradient accumulation over lists of tensors: gpipe_fast::accumulate_(accumulators, gradients), and its unchecked
// variant gpipe_fast::_accumulate_ for programs, whose tensors are checked during lowering.
#pragma once

#include <ATen/core/Tensor.h>

namespace gpipe_fast {

// Throws if accumulate_ cannot add the pairs: the lists differ in length, a gradient's shape or device differs from
// its accumulator's, or a gradient's dtype does not cast to its accumulator's dtype.
void check_pairs(at::TensorList accumulators, at::TensorList gradients);

// Throws if an accumulator shares memory with another tensor of the call, because the order in which pairs are added
// is unspecified. Compares the address ranges that the tensors span; O(n log n).
void check_disjoint(at::TensorList accumulators, at::TensorList gradients);

// gpipe_fast::_accumulate_: computes accumulator += gradient for every pair. Requires, but does not check, the
// conditions of check_pairs() and check_disjoint(); autograd does not see the additions. On CUDA one launch, which a
// graph can capture, adds up to 128 pairs of equal dtypes and strides.
void accumulate_unchecked(at::TensorList accumulators, at::TensorList gradients);

}  // namespace gpipe_fast
