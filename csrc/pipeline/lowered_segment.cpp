#include "pipeline/lowered_segment.h"

#include "check.h"
#include "pipeline/stage_state.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>

#include <algorithm>
#include <utility>

namespace gpipe_fast {
namespace {

bool matches(const Layout& layout, const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && layout.matches(tensor);
}

const at::Tensor& find(const Port& port, const SegmentContext& context, const Tensors& tangents) {
  switch (port.role) {
    case Role::buffer:
      return context.buffers.at(port.index);
    case Role::key:
      return context.key;
    case Role::input:
      return context.inputs.at(port.index);
    case Role::saved:
      return context.saved.at(port.index);
    case Role::held:
      return context.held.at(port.index);
    case Role::tangent:
      return tangents.at(port.index);
    default:
      GPIPE_CHECK(false, "a program's input has a role that only outputs can have");
  }
}

bool differentiable(const BoundaryForm& form) {
  const auto is_set = [](const auto& skip) { return skip.value_or(false); };
  return std::find(form.needs_gradient.begin(), form.needs_gradient.end(), true) !=
             form.needs_gradient.end() ||
         std::any_of(form.skips.begin(), form.skips.end(), is_set);
}

}  // namespace

bool LoweredSegment::accepts_inputs(int64_t layer, const Boundary& boundary, const Skips& skips) const {
  if (layer != begin) return false;
  const BoundaryForm& form = *boundary.form;
  if (input_form->structure != form.structure || input_form->needs_gradient != form.needs_gradient)
    return false;
  size_t next = 0;
  for (const at::Tensor& tensor : boundary.tensors) {
    if (!matches(inputs.at(next++), tensor)) return false;
  }
  for (size_t i = 0; i < pops.size(); ++i) {
    const Skip& skip = skips.at(pops[i]);
    if (input_form->skips[i].has_value() != skip.tensor.defined()) return false;
    if (!skip.tensor.defined()) continue;
    if (*input_form->skips[i] != skip.needs_gradient || !matches(inputs.at(next++), skip.tensor))
      return false;
  }
  return true;
}

bool LoweredSegment::accepts_gradients(const Tensors& gradients) const {
  for (size_t i = 0; i < std::max(gradients.size(), tangent_layouts.size()); ++i) {
    const bool is_due = i < tangent_layouts.size() && tangent_layouts[i];
    if (is_due != (i < gradients.size() && gradients[i].defined())) return false;
    if (is_due && !matches(*tangent_layouts[i], gradients[i])) return false;
  }
  return true;
}

std::vector<const Layout*> LoweredSegment::placeable() const {
  std::vector<const Layout*> layouts;
  const std::vector<Port>& ports = programs->forward.outputs;
  for (size_t i = 0; i < ports.size(); ++i) {
    if (ports[i].role != Role::output) continue;
    layouts.resize(std::max<size_t>(layouts.size(), ports[i].index + 1));
    layouts[ports[i].index] = programs->forward.program->placeable(i);
  }
  return layouts;
}

Segment::Result LoweredSegment::forward(const SegmentCall& call, Boundary boundary,
                                        const Tensors& memory) const {
  StageState& stage = call.stage;
  SegmentContext& context = call.context;
  context.inputs = std::move(boundary.tensors);
  context.buffers = stage.forward.buffers;
  Tensors arguments, no_accumulators, memory_of_results;
  arguments.reserve(programs->forward.inputs.size());
  for (const Port& port : programs->forward.inputs) arguments.push_back(find(port, context, {}));
  for (const Port& port : programs->forward.outputs) {
    if (memory.empty()) break;
    memory_of_results.push_back(port.role == Role::output ? memory.at(port.index) : at::Tensor());
  }
  stage.bind(programs->forward.program);
  Tensors results =
      programs->forward.program->run(arguments, no_accumulators, true, &call.token, memory_of_results);
  Boundary outputs{{}, output_form};
  for (size_t i = 0; i < results.size(); ++i) {
    const Port& port = programs->forward.outputs[i];
    Tensors& destination = port.role == Role::output   ? outputs.tensors
                           : port.role == Role::buffer ? stage.forward.buffers
                                                       : context.saved;
    store_at(destination, port.index, std::move(results[i]));
    if (port.role == Role::buffer && !port.keeps_version) stage.new_versions.insert(port.index);
  }
  for (int64_t index : reached) stage.reached[index] = true;
  keep_only(stage, context);
  return {std::move(outputs), written_inputs};
}

// Frees the tensors that no backward reads. If a backward may follow, all inputs and buffers are kept, because a
// fallback segment may read any of them.
void LoweredSegment::keep_only(const StageState& stage, SegmentContext& context) const {
  if (!stage.needs_backward || !differentiable(*output_form)) {
    context.inputs.clear();
    context.buffers.clear();
    context.saved.clear();
    context.key.reset();
    return;
  }
  // The module's own buffer is written after the forward has succeeded, and the recompute must read its previous
  // values.
  for (const Port& port : programs->forward.outputs) {
    if (port.role != Role::buffer) continue;
    at::Tensor& buffer = context.buffers.at(port.index);
    if (buffer.is_same(stage.module_buffers[port.index])) buffer = buffer.clone();
  }
  if (!programs->backward.program) context.saved.clear();
  if (stage.device.is_cpu()) return;
  for (const at::Tensor& tensor : context.saved) {
    if (tensor.defined() && (tensor.use_count() > 1 || tensor.storage().use_count() > 1))
      context.shared.push_back(tensor);
  }
}

void LoweredSegment::check_buffers(const StageState& stage, const SegmentContext& context) const {
  if (stage.buffer_versions.empty()) return;
  for (const Port& port : programs->backward.inputs) {
    if (port.role != Role::buffer) continue;
    const auto found = stage.buffer_versions.find(port.index);
    const at::Tensor& buffer = stage.module_buffers[port.index];
    // Another segment of the stage may have kept the module's buffer, and this one a copy.
    if (found == stage.buffer_versions.end() || !context.buffers.at(port.index).is_same(buffer)) continue;
    const auto& [version, data] = found->second;
    GPIPE_CHECK(buffer._version() == version && buffer.const_data_ptr() == data,
                "one of the variables needed for gradient computation has been modified by an inplace "
                "operation: buffer ",
                port.index, " of stage ", stage.index, " [", buffer.toString(), " ", buffer.sizes(),
                "] is at version ", buffer._version(), "; expected version ", version,
                " instead, at the same address");
  }
}

void LoweredSegment::open(const SegmentCall& call) const {
  const ProgramWithPorts& program = programs->backward;
  if (!program.program) return;
  StageState& stage = call.stage;
  std::unique_ptr<StartedBackward>& open = stage.backward.open;
  if (defers_weights()) {
    stage.bind(program.program);
    open = std::make_unique<StartedBackward>(*program.program, 0);  // accumulates nothing
  } else {
    open = start(program, stage);
  }
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    if (program.inputs[i].role != Role::tangent) open->run.take(i, find(program.inputs[i], call.context, {}));
  }
  open->run.execute(Part::early, &call.token);
}

std::unique_ptr<StartedBackward> LoweredSegment::start(const ProgramWithPorts& program,
                                                       StageState& stage) const {
  BackwardState& state = stage.backward;
  stage.bind(program.program);
  size_t defined = 0;
  bool from_python = false;
  for (int64_t index : programs->gradients) {
    defined += state.gradients[index].defined() ? 1 : 0;
    from_python = from_python || state.from_python.count(index) != 0;
  }
  if (from_python && defined == programs->gradients.size()) {
    // Clones the gradients from Python, so that the program accumulates in place: it then adds the gradients of a
    // parameter's uses one by one, as after a lowered micro-batch.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (int64_t index : programs->gradients) {
      if (state.from_python.erase(index) != 0) state.gradients[index] = state.gradients[index].clone();
    }
    from_python = false;
  }
  if (from_python || (defined != 0 && defined != programs->gradients.size()))
    return std::make_unique<StartedBackward>(*program.program, state.gradients.size());
  return std::make_unique<StartedBackward>(*program.program, state.gradients, defined == 0);
}

Tensors LoweredSegment::backward(const SegmentCall& call, const Tensors& output_gradients,
                                 bool with_parameters) const {
  const ProgramWithPorts& program = programs->backward;
  if (!program.program) return {};  // nothing before this segment's outputs needs a gradient
  if (!call.stage.backward.open) open(call);
  Program::Run& run = call.stage.backward.open->run;
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    if (program.inputs[i].role == Role::tangent)
      run.take(i, find(program.inputs[i], call.context, output_gradients));
  }
  // The run owns them now, and frees each after its last use, while the gradients of parameters grow.
  if (!call.stage.retains_graph && !defers_weights()) call.context.saved.clear();
  run.execute(Part::results, &call.token);
  const Tensors results = run.outputs();
  if (!call.stage.device.is_cpu()) {
    Tensors& boundary = call.stage.backward.open->boundary = output_gradients;
    boundary.insert(boundary.end(), results.begin(), results.end());
  }
  Tensors gradients;
  for (size_t i = 0; i < results.size(); ++i) {
    const Port& port = program.outputs[i];
    store_at(port.role == Role::held ? call.context.held : gradients, port.index, results[i]);
  }
  if (defers_weights()) {
    run.execute(Part::rest, &call.token);
    run.finish();
    call.stage.backward.open.reset();
    keep_for_weights(call.stage, call.context, output_gradients);
  }
  if (with_parameters) finish(call);
  return gradients;
}

// Keeps the gradients of outputs if the program of weights reads them, and frees what it does not read.
void LoweredSegment::keep_for_weights(const StageState& stage, SegmentContext& context,
                                      const Tensors& tangents) const {
  context.tangents = tangents;
  context.has_deferred_weights = true;
  const auto keep = [&](Tensors& tensors, Role role) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto reads = [&](const Port& port) {
        return port.role == role && static_cast<size_t>(port.index) == i;
      };
      if (std::none_of(programs->weights.inputs.begin(), programs->weights.inputs.end(), reads))
        tensors[i].reset();
    }
  };
  keep(context.tangents, Role::tangent);
  if (stage.retains_graph) return;
  keep(context.inputs, Role::input);
  keep(context.buffers, Role::buffer);
  keep(context.saved, Role::saved);
  const auto is_freed = [&](const at::Tensor& shared) {
    return std::none_of(context.saved.begin(), context.saved.end(),
                        [&](const at::Tensor& saved) { return saved.is_same(shared); });
  };
  context.shared.erase(std::remove_if(context.shared.begin(), context.shared.end(), is_freed),
                       context.shared.end());
}

void LoweredSegment::finish(const SegmentCall& call) const {
  StageState& stage = call.stage;
  if (!defers_weights()) {
    if (!stage.backward.open) return;
    complete(*stage.backward.open, stage, call.token);
    stage.backward.open.reset();
    return;
  }
  SegmentContext& context = call.context;
  if (!std::exchange(context.has_deferred_weights, false)) return;
  const std::unique_ptr<StartedBackward> started = start(programs->weights, stage);
  for (size_t i = 0; i < programs->weights.inputs.size(); ++i)
    started->run.take(i, find(programs->weights.inputs[i], context, context.tangents));
  started->run.execute(Part::early, &call.token);
  started->run.execute(Part::results, &call.token);
  complete(*started, stage, call.token);
  context.tangents.clear();
  context.held.clear();
}

void LoweredSegment::complete(StartedBackward& started, StageState& stage, CancellationToken& token) const {
  started.run.execute(Part::rest, &token);
  started.run.finish();
  if (started.separate.empty()) return;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (int64_t index : programs->gradients) {
    at::Tensor& gradient = stage.backward.gradients[index];
    gradient = gradient.defined() ? at::add(gradient, started.separate[index]) : started.separate[index];
  }
}

int64_t LoweredSegment::scratch_bytes() const {
  int64_t bytes = 0;
  for (const ProgramWithPorts* each : {&programs->forward, &programs->backward, &programs->weights}) {
    if (each->program) bytes = std::max(bytes, each->program->arena_bytes());
  }
  return bytes;
}

std::shared_ptr<Arena> LoweredSegment::arena() const { return programs->forward.program->arena(); }

}  // namespace gpipe_fast
