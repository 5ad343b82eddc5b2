#include "pipeline/microbatches.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <utility>

namespace gpipe_fast {
namespace {

// Autocast refuses some dtypes in `cat`, and nothing is to be cast here.
struct PlainDispatch {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Returns the micro-batches' tensors at an index; empty if one of them is undefined.
Tensors parts_of(const std::vector<Tensors>& microbatches, size_t index) {
  Tensors parts;
  for (const Tensors& microbatch : microbatches) {
    if (index >= microbatch.size() || !microbatch[index].defined()) return {};
    parts.push_back(microbatch[index]);
  }
  return parts;
}

}  // namespace

std::vector<Tensors> split_along(const Tensors& tensors, const std::vector<std::optional<int64_t>>& dims,
                                 int64_t num_parts) {
  return split_tensors(tensors, num_parts, [&](size_t i) {
    return dims[i] ? tensors[i].chunk(num_parts, *dims[i]) : Tensors(num_parts, tensors[i]);
  });
}

PartLengths lengths_of(const std::vector<Boundary>& parts, int64_t dim) {
  PartLengths sizes(parts.front().tensors.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    for (const Boundary& part : parts) sizes[i].push_back(part.tensors[i].size(dim));
  }
  return sizes;
}

std::vector<Tensors> split_gradients(const Tensors& gradients, const PartLengths& sizes, int64_t num_parts,
                                     int64_t dim) {
  return split_tensors(gradients, num_parts,
                       [&](size_t i) { return gradients[i].split_with_sizes(sizes[i], dim); });
}

Boundary concatenate(const std::vector<Boundary>& parts, int64_t dim) {
  const PlainDispatch plain;
  auto form = std::make_shared<BoundaryForm>(*parts.front().form);
  for (const Boundary& part : parts) {
    for (size_t i = 0; i < form->needs_gradient.size(); ++i) {
      form->needs_gradient[i] = form->needs_gradient[i] || part.form->needs_gradient.at(i);
    }
  }
  Boundary result{{}, std::move(form)};
  for (size_t i = 0; i < parts.front().tensors.size(); ++i) {
    Tensors tensors;
    for (const Boundary& part : parts) tensors.push_back(part.tensors.at(i));
    result.tensors.push_back(at::cat(tensors, dim));
  }
  return result;
}

Tensors combine_gradients(const std::vector<Tensors>& microbatches,
                          const std::vector<std::optional<int64_t>>& dims) {
  const PlainDispatch plain;
  Tensors result(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) {
    const Tensors parts = parts_of(microbatches, i);
    if (parts.empty()) continue;
    if (dims[i]) {
      result[i] = at::cat(parts, *dims[i]);
      continue;
    }
    result[i] = parts.size() == 1 ? parts.back().clone() : parts.back();
    for (size_t m = parts.size() - 1; m-- > 0;) result[i] = at::add(result[i], parts[m]);
  }
  return result;
}

}  // namespace gpipe_fast
