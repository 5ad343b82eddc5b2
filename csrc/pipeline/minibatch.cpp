#include "pipeline/minibatch.h"

#include "check.h"
#include "pipeline/skip.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

namespace gpipe_fast {
namespace {

// As draws read it, from memory of the host that a device can copy at once.
constexpr int64_t kKeyWords = 3;

void write_key(int64_t* key, int64_t minibatch, int64_t microbatch, int64_t first_layer) {
  key[0] = minibatch;
  key[1] = microbatch;
  key[2] = first_layer;
}

at::Tensor make_key(int64_t minibatch, int64_t microbatch, int64_t first_layer, at::Device device) {
  at::Tensor key = at::empty({kKeyWords}, at::TensorOptions(at::kLong).pinned_memory(!device.is_cpu()));
  write_key(key.mutable_data_ptr<int64_t>(), minibatch, microbatch, first_layer);
  return device.is_cpu() ? key : key.to(device, /*non_blocking=*/true);
}

}  // namespace

MiniBatch::MiniBatch(std::shared_ptr<const Plan> plan, std::shared_ptr<const Transport> transport,
                     const Tensors& parameters, const Tensors& buffers, std::function<int64_t()> key)
    : plan_(std::move(plan)),
      transport_(std::move(transport)),
      callers_(transport_->callers()),
      key_(std::move(key)),
      num_parameters_(parameters.size()),
      stages_(plan_->stages.size()) {
  for (size_t i = 0; i < stages_.size(); ++i) {
    const StagePlan& plan = plan_->stages[i];
    Stage& stage = stages_[i];
    // Not the parameters themselves: `p.data = ...` between forward and backward must not reach the backward.
    for (int64_t index : plan.parameters) stage.parameters.push_back(parameters.at(index).tensor_data());
    for (int64_t position : plan.replicas) stage.homes.emplace(position, stage.parameters.at(position));
    for (int64_t index : plan.buffers) stage.module_buffers.push_back(buffers.at(index));
  }
}

void MiniBatch::draw() {
  if (transport_->is_cpu()) return;
  for (size_t i = 0; i < stages_.size(); ++i) {
    const at::Tensor keys = draw_keys(i);
    if (!keys.defined()) continue;
    const Stream& work = transport_->work(static_cast<int32_t>(i));
    const Stream::Current current(work);
    stages_[i].keys = keys.to(work.device(), /*non_blocking=*/true);
  }
}

void MiniBatch::replicate() {
  for (size_t i = 0; i < stages_.size(); ++i) {
    for (const auto& [position, original] : stages_[i].homes) {
      stages_[i].parameters[position] =
          transport_->copy(original, stream_on(original.device()), transport_->work(static_cast<int32_t>(i)));
    }
  }
}

// A stage's, where one is there.
Stream MiniBatch::stream_on(at::Device device) const {
  for (size_t i = 0; i < plan_->stages.size(); ++i) {
    if (plan_->stages[i].device == device) return transport_->work(static_cast<int32_t>(i));
  }
  return Stream::of_thread(device);
}

at::Tensor MiniBatch::draw_keys(size_t index) {
  const StagePlan& plan = plan_->stages[index];
  if (plan.find) return {};
  std::vector<int64_t>& first = stages_[index].first_keys;
  first.clear();
  std::vector<std::pair<int64_t, int64_t>> drawing;  // micro-batches, first layers
  for (size_t m = 0; m < plan.chains.size(); ++m) {
    first.push_back(static_cast<int64_t>(drawing.size()));
    for (const auto& segment : plan.chains[m]) {
      if (segment->draws) drawing.emplace_back(m, segment->first_layer);
    }
  }
  if (drawing.empty()) return {};
  const at::TensorOptions options = at::TensorOptions(at::kLong).pinned_memory(!plan.device.is_cpu());
  at::Tensor keys = at::empty({static_cast<int64_t>(drawing.size()), kKeyWords}, options);
  int64_t* row = keys.mutable_data_ptr<int64_t>();
  for (const auto& [microbatch, first_layer] : drawing) {
    write_key(row, key_(), microbatch, first_layer);
    row += kKeyWords;
  }
  return keys;
}

at::Tensor MiniBatch::key_of(const Action& action, const Segment& segment, const Cell& cell) const {
  const Stage& stage = stages_[action.stage];
  const int32_t m = action.microbatch;
  if (!stage.keys.defined())
    return make_key(key_(), m, segment.first_layer, plan_->stages[action.stage].device);
  // The segment's own link is the last.
  const auto before = std::count_if(cell.links.begin(), cell.links.end() - 1,
                                    [](const Link& link) { return link.segment->draws; });
  return stage.keys.select(0, stage.first_keys[m] + before);
}

void MiniBatch::begin_forward(std::vector<Tensors> microbatches) {
  GPIPE_CHECK(static_cast<int64_t>(microbatches.size()) == plan_->num_microbatches(), "a plan for ",
              plan_->num_microbatches(), " micro-batches got ", microbatches.size());
  for (size_t i = 0; i < stages_.size(); ++i) {
    Stage& stage = stages_[i];
    stage.cells = std::vector<Cell>(microbatches.size());
    stage.buffers = stage.module_buffers;
    stage.bound.clear();
    stage.statistics.clear();
    for (const Statistics& own : plan_->stages[i].statistics)
      stage.statistics.push_back(own.begin(stage.buffers));
  }
  skips_.assign(microbatches.size(), Skips(plan_->num_skips));
  num_inputs_ = microbatches.front().size();
  for (size_t m = 0; m < microbatches.size(); ++m) {
    stages_.front().cells[m].arrived = {std::move(microbatches[m]), plan_->inputs};
  }
  surroundings_.emplace(plan_->num_threads);
  phase_ = Phase::forward;
}

std::vector<Boundary> MiniBatch::take_outputs() {
  std::vector<Boundary> outputs;
  for (Cell& cell : stages_.back().cells) outputs.push_back(std::move(cell.outputs));
  return outputs;
}

void MiniBatch::end_forward() {
  at::NoGradGuard no_grad;
  for (size_t index = 0; index < stages_.size(); ++index) {
    Stage& stage = stages_[index];
    const std::vector<Statistics>& statistics = plan_->stages[index].statistics;
    for (size_t i = 0; i < statistics.size(); ++i) statistics[i].end(stage.buffers, stage.statistics[i]);
    for (size_t i = 0; i < stage.buffers.size(); ++i) {
      const at::Tensor &own = stage.module_buffers[i], &found = stage.buffers[i];
      if (found.is_same(own)) continue;
      own.copy_(found);
      Stream::of_thread(own.device()).uses(found);
    }
    stage.buffers.clear();
    stage.statistics.clear();
    stage.noted.clear();
    stage.bound.clear();
  }
  note_buffers();
  phase_ = Phase::idle;
  kept_ = true;
}

void MiniBatch::note_buffers() {
  for (Stage& stage : stages_) {
    for (const Cell& cell : stage.cells) {
      for (const Link& link : cell.links) {
        for (size_t i = 0; i < link.buffers.size(); ++i) {
          const at::Tensor& own = stage.module_buffers[i];
          if (link.buffers[i].is_same(own) && !own.is_inference())
            stage.noted_buffers[i] = {own._version(), own.const_data_ptr()};
        }
      }
    }
  }
}

void MiniBatch::abandon() {
  if (phase_ == Phase::forward) restore_noted();
  kept_ = kept_ && retain_;
  for (Stage& stage : stages_) {
    stage.open.reset();
    stage.bound.clear();
    stage.buffers.clear();
    stage.gradients.clear();
    for (Cell& cell : stage.cells) {
      cell.arrived = {};
      cell.outputs = {};
      cell.tangents.clear();
      cell.input_gradients.clear();
    }
    if (!kept_) stage.cells.clear();
  }
  for (Skips& skips : skips_) skips.assign(skips.size(), {});
  phase_ = Phase::idle;
  backward_plan_.reset();
}

// Layers in Python write the module's own buffers.
void MiniBatch::restore_noted() {
  for (Stage& stage : stages_) {
    for (auto it = stage.noted.rbegin(); it != stage.noted.rend(); ++it) it->first->restore(it->second);
    stage.noted.clear();
  }
}

void MiniBatch::enter(int32_t stage, const std::function<void()>& walk) {
  const Stream::Current current(transport_->work(stage));
  surroundings_->run(walk);
}

void MiniBatch::bind(Stage& stage, const std::shared_ptr<Program>& program) {
  if (std::find(stage.bound.begin(), stage.bound.end(), program) != stage.bound.end()) return;
  program->bind(stage.parameters);
  stage.bound.push_back(program);
}

void MiniBatch::run(const Action& action, Watch& watch) {
  at::RecordFunction range(at::RecordScope::USER_SCOPE);
  if (range.isActive()) range.before("PP:" + action.name());
  const int32_t m = action.microbatch;
  Cell& cell = stages_[action.stage].cells[m];
  switch (action.kind) {
    case ActionKind::forward:
      return forward(action, watch);
    case ActionKind::recompute:
    case ActionKind::backward:
    case ActionKind::backward_inputs:
    case ActionKind::backward_weights:
      return backward(action, watch);
    case ActionKind::send_forward: {
      Cell& next = stages_[action.stage + 1].cells[m];
      send(cell.outputs.tensors, action.stage, action.stage + 1, Way::forward, next);
      next.arrived = std::move(cell.outputs);
      return;
    }
    case ActionKind::send_backward: {
      Cell& before = stages_[action.stage - 1].cells[m];
      send(cell.input_gradients, action.stage, action.stage - 1, Way::backward, before);
      before.tangents = std::move(cell.input_gradients);
      return;
    }
    case ActionKind::recv_forward:
    case ActionKind::recv_backward:
      transport_->receive(action.stage, cell.there);  // where the sender has put it
      return;
  }
}

void MiniBatch::send(Tensors& tensors, int32_t sender, int32_t receiver, Way way, Cell& there) const {
  if (!transport_->is_cpu())
    there.there = transport_->send(tensors, sender, Moment(transport_->work(sender)), receiver, way);
}

void MiniBatch::put_down(const std::vector<int64_t>& numbers, Skips& skips, int32_t stage) const {
  if (transport_->is_cpu()) return;
  for (int64_t number : numbers) {
    skips[number].stage = stage;
    skips[number].made = Moment(transport_->work(stage));
  }
}

void MiniBatch::fetch(const std::vector<int64_t>& numbers, Skips& skips, int32_t stage) const {
  if (transport_->is_cpu()) return;
  for (int64_t number : numbers) {
    Skip& skip = skips[number];
    if (skip.stage == stage) continue;
    Tensors tensors{std::move(skip.tensor), std::move(skip.gradient)};
    transport_->receive(stage, transport_->send(tensors, skip.stage, skip.made, stage, Way::skip));
    skip.tensor = std::move(tensors[0]);
    skip.gradient = std::move(tensors[1]);
    skip.stage = stage;
  }
}

const at::Tensor& MiniBatch::find(const Port& port, const Link& link, const Tensors& tangents) {
  switch (port.role) {
    case Role::buffer:
      return link.buffers.at(port.index);
    case Role::key:
      return link.key;
    case Role::input:
      return link.inputs.at(port.index);
    case Role::saved:
      return link.saved.at(port.index);
    case Role::tangent:
      return tangents.at(port.index);
    default:
      GPIPE_CHECK(false, "a program reads a port that only results have");
  }
}

void MiniBatch::forward(const Action& action, Watch& watch) {
  const StagePlan& plan = plan_->stages[action.stage];
  Stage& stage = stages_[action.stage];
  Cell& cell = stage.cells[action.microbatch];
  Skips& skips = skips_[action.microbatch];
  Boundary value = std::move(cell.arrived);
  for (int64_t layer = 0; layer < plan.num_layers; layer = cell.links.back().segment->end) {
    auto segment = plan.segment(action.microbatch, cell.links.size(), layer, value, skips);
    Link& link = cell.links.emplace_back();
    link.segment = std::move(segment);
    const size_t num_plain = value.tensors.size();
    fetch(link.segment->pops, skips, action.stage);
    value = pop(*link.segment, skips, std::move(value));
    if (!link.segment->pops.empty()) link.takes = value.form;
    bool writes_inputs = link.segment->writes_inputs;
    Tensors taken;
    if (!skips.empty() && (writes_inputs || link.segment->python)) taken = value.tensors;
    value = link.segment->python ? forward_in_python(action, stage, link, value, writes_inputs)
                                 : forward_lowered(action, stage, link, std::move(value), watch);
    if (writes_inputs) check_not_stashed(*link.segment, skips, taken, num_plain);
    if (!link.segment->stashes.empty()) link.returns = value.form;
    value = stash(*link.segment, skips, std::move(value));
    put_down(link.segment->stashes, skips, action.stage);
  }
  cell.outputs = std::move(value);
}

Boundary MiniBatch::forward_lowered(const Action& action, Stage& stage, Link& link, Boundary inputs,
                                    Watch& watch) {
  const Segment& segment = *link.segment;
  const Pass& pass = *segment.pass;
  link.inputs = std::move(inputs.tensors);
  link.buffers = stage.buffers;
  if (segment.draws) link.key = key_of(action, segment, stage.cells[action.microbatch]);
  Tensors arguments, no_accumulators;
  arguments.reserve(pass.forward.inputs.size());
  for (const Port& port : pass.forward.inputs) arguments.push_back(find(port, link, {}));
  bind(stage, pass.forward.program);
  Tensors results = pass.forward.program->run(arguments, no_accumulators, true, &watch);
  Boundary outputs{{}, segment.returns};
  for (size_t i = 0; i < results.size(); ++i) {
    const Port& port = pass.forward.outputs[i];
    Tensors& destination = port.role == Role::output   ? outputs.tensors
                           : port.role == Role::buffer ? stage.buffers
                                                       : link.saved;
    put(destination, port.index, std::move(results[i]));
  }
  keep_only(pass, stage, link);
  return outputs;
}

Boundary MiniBatch::forward_in_python(const Action& action, Stage& stage, Link& link, const Boundary& inputs,
                                      bool& writes_inputs) {
  const std::shared_ptr<PythonLayers>& layers = link.segment->python;
  const auto is_it = [&](const auto& noted) { return noted.first == layers; };
  if (std::none_of(stage.noted.begin(), stage.noted.end(), is_it))
    stage.noted.emplace_back(layers, layers->note());
  {
    at::NoGradGuard no_grad;
    for (int64_t index : link.segment->buffers) {
      // Lowered layers that share it have written a copy.
      at::Tensor& own = stage.module_buffers[index];
      if (!stage.buffers[index].is_same(own)) own.copy_(stage.buffers[index]);
      stage.buffers[index] = own;
    }
  }
  PythonLayers::Result result = layers->forward(inputs, key_, action.microbatch, action.name());
  link.kept = std::move(result.kept);
  writes_inputs = result.writes_inputs;
  return std::move(result.outputs);
}

// Only what the backward reads outlives the action. A backward that stands in for the plan's may read any input and any
// buffer.
void MiniBatch::keep_only(const Pass& pass, const Stage& stage, Link& link) const {
  const bool others = plan_->instead || (dynamic() && plan_->backward);
  Tensors inputs, buffers;
  for (const Port& port : pass.backward.inputs) {
    if (port.role == Role::input) put(inputs, port.index, link.inputs.at(port.index));
    if (port.role == Role::buffer) put(buffers, port.index, link.buffers.at(port.index));
  }
  if (others) {
    inputs = std::move(link.inputs);
    buffers = std::move(link.buffers);
  }
  // The module's own buffer is written when the forward has succeeded, and the recompute must read what stood there
  // before.
  for (const Port& port : pass.forward.outputs) {
    if (port.role != Role::buffer || static_cast<size_t>(port.index) >= buffers.size()) continue;
    at::Tensor& buffer = buffers[port.index];
    if (buffer.defined() && buffer.is_same(stage.module_buffers[port.index])) buffer = buffer.clone();
  }
  link.inputs = std::move(inputs);
  link.buffers = std::move(buffers);
  if (pass.backward.program) return;
  link.saved.clear();
  if (!others) link.key.reset();
}

}  // namespace gpipe_fast
