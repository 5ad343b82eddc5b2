// Splits mini-batches into micro-batches and concatenates micro-batches. Everything runs below autograd, because a
// mini-batch is one node of the autograd graph.
#pragma once

#include "pipeline/boundary.h"
#include "program/program.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gpipe_fast {

// Splits tensor i by `split(i)`, and returns the parts by micro-batch. An undefined tensor has undefined parts.
template <class Split>
std::vector<Tensors> split_tensors(const Tensors& tensors, int64_t num_parts, const Split& split) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<Tensors> microbatches(num_parts, Tensors(tensors.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    const Tensors parts = split(i);
    for (size_t m = 0; m < microbatches.size(); ++m) microbatches[m][i] = parts.at(m);
  }
  return microbatches;
}

// Splits each tensor along its dimension; nullopt: every micro-batch gets the whole tensor.
std::vector<Tensors> split_along(const Tensors& tensors, const std::vector<std::optional<int64_t>>& dims,
                                 int64_t num_parts);

// Lengths of the concatenated parts, by tensor and micro-batch.
using PartLengths = std::vector<std::vector<int64_t>>;
PartLengths lengths_of(const std::vector<Boundary>& parts, int64_t dim);

// Memory for the outputs of a mini-batch, so that they need no concatenation: micro-batches write into its slices.
//
//   one output  [ micro-batch 0 | micro-batch 1 | micro-batch 2 ]
class OutputMemory {
 public:
  // `layouts`: by micro-batch and output, the layout of those that are placeable: contiguous, with the batch's
  // dimension first. An output that is placeable in all micro-batches gets memory, if its slices are aligned like
  // tensors of their own.
  OutputMemory(const std::vector<std::vector<const Layout*>>& layouts, at::Device device);
  // Returns a micro-batch's slices, by output; undefined where there is no memory.
  const Tensors& of(size_t microbatch) const { return slices_.at(microbatch); }
  // Returns an output whose slices are these parts, or an undefined tensor. Call on the caller's thread.
  at::Tensor joined(const Tensors& parts, size_t output) const;

 private:
  Tensors memory_;               // by output
  std::vector<Tensors> slices_;  // by micro-batch and output
};

// Concatenates the tensors of all parts along a dimension, but those that are slices of `memory`.
Boundary concatenate(const std::vector<Boundary>& parts, int64_t dim,
                     const std::optional<OutputMemory>& memory);

// Splits the gradients of concatenated tensors, by micro-batch.
std::vector<Tensors> split_gradients(const Tensors& gradients, const PartLengths& sizes, int64_t num_parts,
                                     int64_t dim);

// Combines the micro-batches' gradients of inputs. Gradients of split inputs are concatenated along `dims`;
// gradients of whole inputs (nullopt) are summed as autograd does, the last micro-batch first. The results never
// alias the micro-batches' gradients, which may lie in a graph's memory.
Tensors combine_gradients(const std::vector<Tensors>& microbatches,
                          const std::vector<std::optional<int64_t>>& dims);

}  // namespace gpipe_fast
