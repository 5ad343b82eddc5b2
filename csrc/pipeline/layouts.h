// Layouts of the tensors that enter a captured graph; the graph's own tensors have the same layouts.
#pragma once

#include "pipeline/boundary.h"
#include "program/program.h"

#include <optional>
#include <vector>

namespace gpipe_fast {

// By tensor; nullopt for an undefined one.
using Layouts = std::vector<std::optional<Layout>>;

Layouts layouts_of(const Tensors& tensors);
bool layouts_match(const Layouts& layouts, const Tensors& tensors);

// Returns zeros with these layouts; nullopt if one of them has gaps in memory, or overlaps itself other than by
// expanded dimensions.
std::optional<Tensors> zeros_with_layouts(const Layouts& layouts, at::Device device);

// Returns an uninitialized tensor with memory of its own, and with the same strides if those have no gaps.
at::Tensor empty_with_strides(const at::Tensor& tensor);

}  // namespace gpipe_fast
