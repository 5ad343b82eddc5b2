#include "pipeline/python_segment.h"

#include "pipeline/stage_state.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace gpipe_fast {

bool PythonSegment::fits(int64_t layer, const Boundary& /*boundary*/, const Skips& /*skips*/) const {
  return layer == begin && !provisional;
}

Segment::Result PythonSegment::forward(const Visit& visit, Boundary arrived) const {
  StageState& stage = visit.stage;
  auto& noted = stage.forward.noted;
  const auto is_it = [&](const auto& other) { return other.first == layers; };
  if (std::none_of(noted.begin(), noted.end(), is_it)) noted.emplace_back(layers, layers->note());
  bring_buffers(stage);
  const auto is_reached = [&](int64_t index) { return stage.reached[index]; };
  const bool all = std::all_of(parameters.begin(), parameters.end(), is_reached);
  PythonLayers::Result result =
      layers->forward(arrived, stage.key, visit.action.microbatch, visit.action.name(), !all);
  for (size_t i = 0; i < result.reached.size(); ++i) {
    if (result.reached[i]) stage.reached[parameters[i]] = true;
  }
  visit.link.kept = std::move(result.kept);
  return {std::move(result.outputs), result.writes_inputs};
}

// Copies the latest values to the module's buffers: lowered layers that share a buffer have written a copy of it.
void PythonSegment::bring_buffers(StageState& stage) const {
  at::NoGradGuard no_grad;
  for (int64_t index : buffers) {
    at::Tensor& own = stage.module_buffers[index];
    at::Tensor& latest = stage.forward.buffers[index];
    if (!latest.is_same(own)) own.copy_(latest);
    latest = own;
  }
}

Tensors PythonSegment::backward(const Visit& visit, const Tensors& tangents, bool /*whole*/) const {
  BackwardState& state = visit.stage.backward;
  Tensors gradients;
  for (int64_t index : parameters) gradients.push_back(state.gradients[index]);
  Tensors inputs =
      layers->backward(visit.link.kept, tangents, gradients, visit.stage.retains, visit.action.name());
  for (size_t i = 0; i < gradients.size(); ++i) {
    state.gradients[parameters[i]] = std::move(gradients[i]);
    state.foreign.insert(parameters[i]);
  }
  return inputs;
}

}  // namespace gpipe_fast
