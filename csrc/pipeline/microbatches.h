// A mini-batch cut into micro-batches, and micro-batches joined. All below autograd: a mini-batch is one node of the graph.
#pragma once

#include "pipeline/boundary.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gpipe_fast {

// Each tensor's parts, by micro-batch; undefined for an undefined tensor.
template <class Split>
std::vector<Tensors> cut(const Tensors& tensors, int64_t num_parts, const Split& split) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<Tensors> microbatches(num_parts, Tensors(tensors.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    const Tensors parts = split(i);
    for (size_t m = 0; m < microbatches.size(); ++m) microbatches[m][i] = parts.at(m);
  }
  return microbatches;
}

// Of what is joined, how long each part is, by tensor and micro-batch.
using Sizes = std::vector<std::vector<int64_t>>;
Sizes sizes_of(const std::vector<Boundary>& parts, int64_t dim);

// All parts' tensors, joined along a dimension.
Boundary join(const std::vector<Boundary>& parts, int64_t dim);

// Gradients of what was joined, by micro-batch.
std::vector<Tensors> cut_gradients(const Tensors& gradients, const Sizes& sizes, int64_t num_parts,
                                   int64_t dim);

// Gradients of inputs: joined, or of replicated ones added up as autograd does, the last micro-batch first. None of them
// lies where the micro-batches' do, which may be in a graph's memory.
Tensors join_gradients(const std::vector<Tensors>& microbatches,
                       const std::vector<std::optional<int64_t>>& dims);

}  // namespace gpipe_fast
