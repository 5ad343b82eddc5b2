#include "pipeline/skip.h"

#include "check.h"

#include <algorithm>
#include <set>
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

void check_not_stashed(const Segment& segment, const Skips& skips, const Tensors& taken,
                       size_t num_boundary) {
  std::set<const void*> stashed;
  for (const Skip& skip : skips) {
    if (skip.tensor.defined()) stashed.insert(skip.tensor.storage().unsafeGetStorageImpl());
  }
  // Popped skip tensors, the last inputs, come first: they count as stashed for the other inputs.
  for (size_t i = taken.size(); i-- > 0;) {
    const void* storage = taken[i].storage().unsafeGetStorageImpl();
    GPIPE_CHECK(
        stashed.count(storage) == 0, "layers ", segment.begin, " to ", segment.end - 1,
        " of the stage change an input of shape ", taken[i].sizes(),
        " in place, and the same memory is also stashed: the layer that pops it would not see the change. "
        "Stash a clone, or make the layers compute out of place");
    if (i >= num_boundary) stashed.insert(storage);
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
