#include "pipeline/python_segment.h"

#include "pipeline/stage_state.h"

#include <algorithm>
#include <utility>

namespace gpipe_fast {

bool PythonSegment::accepts_inputs(int64_t layer, const Boundary& /*boundary*/,
                                   const Skips& /*skips*/) const {
  return layer == begin && !single_use;
}

Segment::Result PythonSegment::forward(const SegmentCall& call, Boundary inputs,
                                       const Tensors& /*memory*/) const {
  StageState& stage = call.stage;
  auto& snapshots = stage.forward.snapshots;
  const auto is_same_layers = [&](const auto& other) { return other.first == layers; };
  if (std::none_of(snapshots.begin(), snapshots.end(), is_same_layers))
    snapshots.emplace_back(layers, layers->snapshot());
  // Lowered layers that share a buffer have written a copy of it.
  for (int64_t index : buffers) stage.write_buffer(index);
  const auto is_reached = [&](int64_t index) { return stage.reached[index]; };
  const bool all = std::all_of(parameters.begin(), parameters.end(), is_reached);
  PythonLayers::Result result =
      layers->forward(inputs, stage.key, call.action.microbatch, call.action.name(), !all);
  for (size_t i = 0; i < result.reached.size(); ++i) {
    if (result.reached[i]) stage.reached[parameters[i]] = true;
  }
  call.context.kept = std::move(result.kept);
  return {std::move(result.outputs), std::move(result.written_inputs)};
}

Tensors PythonSegment::backward(const SegmentCall& call, const Tensors& tangents,
                                bool /*with_parameters*/) const {
  BackwardState& state = call.stage.backward;
  Tensors gradients;
  for (int64_t index : parameters) gradients.push_back(state.gradients[index]);
  Tensors inputs =
      layers->backward(call.context.kept, tangents, gradients, call.stage.retains_graph, call.action.name());
  for (size_t i = 0; i < gradients.size(); ++i) {
    state.gradients[parameters[i]] = std::move(gradients[i]);
    state.from_python.insert(parameters[i]);
  }
  return inputs;
}

}  // namespace gpipe_fast
