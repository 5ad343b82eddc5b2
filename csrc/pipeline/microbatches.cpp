#include "pipeline/microbatches.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>

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

int64_t bytes_of(const Layout& layout) {
  return c10::multiply_integers(layout.sizes) * static_cast<int64_t>(c10::elementSize(layout.dtype));
}

// Returns whether outputs of these layouts can be slices of one tensor; null: the output is not placeable.
bool can_join(const std::vector<const Layout*>& layouts, at::Device device) {
  for (size_t m = 0; m < layouts.size(); ++m) {
    const Layout *first = layouts.front(), *own = layouts[m];
    if (own == nullptr || own->sizes.empty() || own->dtype != first->dtype) return false;
    if (at::IntArrayRef(own->sizes).slice(1) != at::IntArrayRef(first->sizes).slice(1)) return false;
    if (m + 1 < layouts.size() && bytes_of(*own) % alignment_of(device) != 0) return false;
  }
  return true;
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

OutputMemory::OutputMemory(const std::vector<std::vector<const Layout*>>& layouts, at::Device device)
    : memory_(layouts.front().size()), slices_(layouts.size(), Tensors(memory_.size())) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i = 0; i < memory_.size(); ++i) {
    std::vector<const Layout*> parts;
    for (const auto& own : layouts) parts.push_back(i < own.size() ? own[i] : nullptr);
    if (!can_join(parts, device)) continue;
    std::vector<int64_t> sizes = parts.front()->sizes;
    sizes[0] = 0;
    for (const Layout* part : parts) sizes[0] += part->sizes[0];
    memory_[i] = at::empty(sizes, at::TensorOptions(parts.front()->dtype).device(device));
    int64_t offset = 0;
    for (size_t m = 0; m < parts.size(); ++m) {
      slices_[m][i] = memory_[i].as_strided(parts[m]->sizes, parts[m]->strides, offset);
      offset += slices_[m][i].numel();
    }
  }
}

at::Tensor OutputMemory::joined(const Tensors& parts, size_t output) const {
  if (output >= memory_.size() || !memory_[output].defined()) return {};
  for (size_t m = 0; m < parts.size(); ++m) {
    const at::Tensor& slice = slices_.at(m)[output];
    if (!parts[m].is_alias_of(slice) || parts[m].storage_offset() != slice.storage_offset() ||
        parts[m].sizes() != slice.sizes())
      return {};
  }
  // A tensor of the calling thread, which may be in inference mode.
  at::Tensor joined = at::empty({0}, memory_[output].options());
  joined.unsafeGetTensorImpl()->set_storage_keep_dtype(memory_[output].storage());
  joined.unsafeGetTensorImpl()->set_sizes_contiguous(memory_[output].sizes());
  return joined;
}

Boundary concatenate(const std::vector<Boundary>& parts, int64_t dim,
                     const std::optional<OutputMemory>& memory) {
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
    at::Tensor joined = memory ? memory->joined(tensors, i) : at::Tensor();
    result.tensors.push_back(joined.defined() ? std::move(joined) : at::cat(tensors, dim));
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
