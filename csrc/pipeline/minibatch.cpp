#include "pipeline/minibatch.h"

#include "check.h"
#include "pipeline/python_segment.h"
#include "pipeline/skip.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

namespace gpipe_fast {
namespace {

// Words of a random key, as random operators read it. Keys are made in pinned host memory for asynchronous copies.
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
                     const Tensors& parameters, const Tensors& buffers, const std::function<int64_t()>& key)
    : plan_(std::move(plan)),
      transport_(std::move(transport)),
      callers_(transport_->callers()),
      num_parameters_(parameters.size()),
      stages_(plan_->stages.size()) {
  for (size_t i = 0; i < stages_.size(); ++i) {
    const StagePlan& plan = plan_->stages[i];
    StageState& stage = stages_[i];
    stage.index = static_cast<int32_t>(i);
    stage.device = plan.device;
    stage.keeps = plan_->backward != nullptr;
    stage.key = key;
    // Holds tensor_data(), so that `p.data = ...` between forward and backward does not affect the backward.
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

// Returns the work stream of a stage on this device, if there is one; else the calling thread's stream.
Stream MiniBatch::stream_on(at::Device device) const {
  for (size_t i = 0; i < plan_->stages.size(); ++i) {
    if (plan_->stages[i].device == device) return transport_->work(static_cast<int32_t>(i));
  }
  return Stream::of_thread(device);
}

at::Tensor MiniBatch::draw_keys(size_t index) {
  const StagePlan& plan = plan_->stages[index];
  if (!plan.known) return {};
  std::vector<int64_t>& first = stages_[index].first_keys;
  first.clear();
  std::vector<std::pair<int64_t, int64_t>> drawing;  // micro-batch, first layer
  for (size_t m = 0; m < plan.chains.size(); ++m) {
    first.push_back(static_cast<int64_t>(drawing.size()));
    for (const auto& segment : plan.chains[m]) {
      if (const auto first_layer = segment->draws_from()) drawing.emplace_back(m, *first_layer);
    }
  }
  if (drawing.empty()) return {};
  const at::TensorOptions options = at::TensorOptions(at::kLong).pinned_memory(!plan.device.is_cpu());
  at::Tensor keys = at::empty({static_cast<int64_t>(drawing.size()), kKeyWords}, options);
  int64_t* row = keys.mutable_data_ptr<int64_t>();
  for (const auto& [microbatch, first_layer] : drawing) {
    write_key(row, stages_[index].key(), microbatch, first_layer);
    row += kKeyWords;
  }
  return keys;
}

at::Tensor MiniBatch::key_of(const Action& action, int64_t first_layer) const {
  const StageState& stage = stages_[action.stage];
  const int32_t m = action.microbatch;
  if (!stage.keys.defined()) return make_key(stage.key(), m, first_layer, stage.device);
  // The last context is this segment's own.
  const std::vector<Link>& links = stage.cells[m].links;
  const auto before = std::count_if(links.begin(), links.end() - 1,
                                    [](const Link& link) { return link.segment->draws_from().has_value(); });
  return stage.keys.select(0, stage.first_keys[m] + before);
}

void MiniBatch::begin_forward(std::vector<Tensors> microbatches) {
  GPIPE_CHECK(static_cast<int64_t>(microbatches.size()) == plan_->num_microbatches(), "a plan for ",
              plan_->num_microbatches(), " micro-batches got inputs for ", microbatches.size());
  for (size_t i = 0; i < stages_.size(); ++i) {
    StageState& stage = stages_[i];
    stage.cells = std::vector<Cell>(microbatches.size());
    stage.release_programs();
    stage.reached.assign(stage.parameters.size(), false);
    stage.forward = {stage.module_buffers};
    for (const Statistics& own : plan_->stages[i].statistics)
      stage.forward.statistics.push_back(own.begin(stage.forward.buffers));
  }
  skips_.assign(microbatches.size(), Skips(plan_->num_skips));
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
    StageState& stage = stages_[index];
    ForwardState& forward = stage.forward;
    const std::vector<Statistics>& statistics = plan_->stages[index].statistics;
    for (size_t i = 0; i < statistics.size(); ++i) statistics[i].end(forward.buffers, forward.statistics[i]);
    for (size_t i = 0; i < forward.buffers.size(); ++i) {
      const at::Tensor &own = stage.module_buffers[i], &found = forward.buffers[i];
      if (found.is_same(own)) continue;
      own.copy_(found);
      Stream::of_thread(own.device()).uses(found);
    }
    forward = {};
    stage.release_programs();
  }
  note_buffers();
  phase_ = Phase::idle;
  kept_ = true;
}

void MiniBatch::note_buffers() {
  for (StageState& stage : stages_) {
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
  for (StageState& stage : stages_) {
    kept_ = kept_ && stage.retains;
    stage.forward = {};
    stage.backward = {};
    stage.release_programs();
    for (Cell& cell : stage.cells) {
      cell.arrived = {};
      cell.outputs = {};
      cell.tangents.clear();
      cell.input_gradients.clear();
    }
  }
  if (!kept_) {
    for (StageState& stage : stages_) stage.cells.clear();
    memory_owner_.reset();
  }
  for (Skips& skips : skips_) skips.assign(skips.size(), {});
  phase_ = Phase::idle;
}

// Restores the module's own buffers, because layers in Python write them in place.
void MiniBatch::restore_noted() {
  for (StageState& stage : stages_) {
    auto& noted = stage.forward.noted;
    for (auto it = noted.rbegin(); it != noted.rend(); ++it) it->first->restore(it->second);
    noted.clear();
  }
}

std::vector<bool> MiniBatch::reached() const {
  std::vector<bool> reached(num_parameters_, false);
  for (size_t i = 0; i < stages_.size(); ++i) {
    const std::vector<bool>& own = stages_[i].reached;
    for (size_t j = 0; j < own.size(); ++j) {
      if (own[j]) reached[plan_->stages[i].parameters[j]] = true;
    }
  }
  return reached;
}

void MiniBatch::enter(int32_t stage, const std::function<void()>& walk) {
  const Stream::Current current(transport_->work(stage));
  surroundings_->run(walk);
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
      transport_->receive(action.stage, cell.there);  // the sender has stored the tensors here
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

void MiniBatch::forward(const Action& action, Watch& watch) {
  const StagePlan& plan = plan_->stages[action.stage];
  StageState& stage = stages_[action.stage];
  Cell& cell = stage.cells[action.microbatch];
  Skips& skips = skips_[action.microbatch];
  Boundary value = std::move(cell.arrived);
  for (int64_t layer = 0; layer < plan.num_layers; layer = cell.links.back().segment->end) {
    const auto segment = plan.segment(action.microbatch, cell.links.size(), layer, value, skips);
    Link& link = cell.links.emplace_back();
    link.segment = segment;
    const size_t num_plain = value.tensors.size();
    fetch(segment->pops, skips, action.stage);
    value = pop(*segment, skips, std::move(value));
    if (!segment->pops.empty()) link.takes = value.form;
    if (const auto first_layer = segment->draws_from()) link.key = key_of(action, *first_layer);
    const Tensors taken = skips.empty() ? Tensors() : value.tensors;
    Segment::Result result = segment->forward({action, stage, link, watch}, std::move(value));
    if (result.writes_inputs) check_not_stashed(*segment, skips, taken, num_plain);
    if (!segment->stashes.empty()) link.returns = result.outputs.form;
    value = stash(*segment, skips, std::move(result.outputs));
    put_down(segment->stashes, skips, action.stage);
  }
  cell.outputs = std::move(value);
}

}  // namespace gpipe_fast
