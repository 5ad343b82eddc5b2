#include "pipeline/skip.h"

#include "check.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <utility>

namespace gpipe_fast {

Boundary pop(const Segment& segment, Skips& skips, Boundary value) {
  if (segment.pops.empty()) return value;
  auto form = std::make_shared<BoundaryForm>(*value.form);
  for (int64_t index : segment.pops) {
    Skip skip = std::move(skips.at(index));
    form->skips.push_back(skip.tensor.defined() ? std::optional<bool>(skip.needs_gradient) : std::nullopt);
    if (skip.tensor.defined()) value.tensors.push_back(std::move(skip.tensor));
  }
  return {std::move(value.tensors), std::move(form)};
}

Boundary stash(const Segment& segment, Skips& skips, Boundary outputs) {
  if (segment.stashes.empty()) return outputs;
  auto form =
      std::make_shared<BoundaryForm>(BoundaryForm{outputs.form->structure, outputs.form->needs_gradient});
  size_t next = form->needs_gradient.size();
  for (size_t i = 0; i < segment.stashes.size(); ++i) {
    const std::optional<bool>& needs_gradient = outputs.form->skips.at(i);
    if (needs_gradient)
      skips.at(segment.stashes[i]) = {std::move(outputs.tensors.at(next++)), *needs_gradient};
  }
  outputs.tensors.resize(form->needs_gradient.size());
  return {std::move(outputs.tensors), std::move(form)};
}

namespace {

// Returns whether two tensors have memory in common.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!a.has_storage() || !b.has_storage() || !a.is_alias_of(b)) return false;
  if (a.element_size() != b.element_size()) return true;
  const auto end = [](const at::Tensor& t) {
    return static_cast<int64_t>(
        at::detail::computeStorageNbytes(t.sizes(), t.strides(), 1, t.storage_offset()));
  };
  if (end(a) <= b.storage_offset() || end(b) <= a.storage_offset()) return false;
  const at::Tensor marks = at::zeros({std::max(end(a), end(b))}, at::kBool);
  marks.as_strided(a.sizes(), a.strides(), a.storage_offset()).fill_(true);
  return marks.as_strided(b.sizes(), b.strides(), b.storage_offset()).any().item<bool>();
}

}  // namespace

void check_not_shared(const Segment& segment, const Skips& skips, const Tensors& taken,
                      const std::vector<int64_t>& written) {
  Tensors others = taken;
  for (const Skip& skip : skips) {
    if (skip.tensor.defined()) others.push_back(skip.tensor);
  }
  for (int64_t index : written) {
    const at::Tensor& own = taken.at(index);
    for (size_t i = 0; i < others.size(); ++i) {
      GPIPE_CHECK(
          i == static_cast<size_t>(index) || !overlap(own, others[i]), "layers ", segment.begin, " to ",
          segment.end - 1, " of the stage change an input of shape ", own.sizes(),
          " in place, and the same memory is also stashed or another input: what reads it there would "
          "not see the change. Pass or stash a clone, or make the layers compute out of place");
    }
  }
}

void pop_gradients(const Segment& segment, const BoundaryForm& returned, Skips& skips, Tensors& tangents) {
  tangents.resize(returned.needs_gradient.size());
  for (size_t i = 0; i < returned.skips.size(); ++i) {
    if (returned.skips[i]) tangents.push_back(std::move(skips[segment.stashes[i]].gradient));
  }
}

void stash_gradients(const Segment& segment, const BoundaryForm& taken, Skips& skips, Tensors& gradients) {
  size_t next = taken.needs_gradient.size();
  for (size_t i = 0; i < taken.skips.size(); ++i) {
    if (!taken.skips[i]) continue;
    if (next < gradients.size()) skips[segment.pops[i]].gradient = std::move(gradients[next]);
    ++next;
  }
  gradients.resize(std::min(gradients.size(), taken.needs_gradient.size()));
}

}  // namespace gpipe_fast
