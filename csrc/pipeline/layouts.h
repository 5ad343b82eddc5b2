// How tensors are laid out that come to a graph, whose own are laid out the same.
#pragma once

#include "pipeline/boundary.h"
#include "program/program.h"

#include <optional>
#include <vector>

namespace gpipe_fast {

// Nothing for an undefined tensor.
using Layouts = std::vector<std::optional<Layout>>;

Layouts layouts_of(const Tensors& tensors);
bool match(const Layouts& layouts, const Tensors& tensors);

// Of zeros; nothing if some such tensor has gaps in memory, or overlaps itself.
std::optional<Tensors> made_like(const Layouts& layouts, at::Device device);

// The elements of an expanded tensor, once each.
at::Tensor elements(const at::Tensor& tensor);
// A tensor with memory of its own, laid out the same where it can be.
at::Tensor like(const at::Tensor& tensor);

}  // namespace gpipe_fast
