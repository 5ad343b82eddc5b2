#include "pipeline/minibatch.h"

#include "check.h"
#include "device/failure.h"
#include "engine/slots.h"
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

// Keeps the gradient that has the dtype of the loss, if a step has got one for each dtype that the loss may have.
void keep_gradient_of_loss(Tensors& gradients, const Tensors& outputs) {
  if (gradients.size() < 2) return;
  const auto found = std::find_if(gradients.begin(), gradients.end(), [&](const at::Tensor& gradient) {
    return gradient.scalar_type() == outputs.front().scalar_type();
  });
  gradients = {found == gradients.end() ? gradients.front() : *found};
}

}  // namespace

MiniBatch::MiniBatch(std::shared_ptr<const Plan> plan, std::shared_ptr<const Transport> transport,
                     const Tensors& parameters, const Tensors& buffers, const std::function<int64_t()>& key)
    : plan_(std::move(plan)),
      transport_(std::move(transport)),
      caller_streams_(transport_->caller_streams()),
      num_parameters_(parameters.size()),
      stages_(plan_->stages.size()) {
  for (size_t i = 0; i < stages_.size(); ++i) {
    const StagePlan& plan = plan_->stages[i];
    StageState& stage = stages_[i];
    stage.index = static_cast<int32_t>(i);
    stage.device = plan.device;
    stage.needs_backward = plan_->has_backward();
    stage.key = key;
    // Holds tensor_data(), so that `p.data = ...` between forward and backward does not affect the backward.
    for (int64_t index : plan.parameters) stage.parameters.push_back(parameters.at(index).tensor_data());
    for (int64_t position : plan.replicated_parameters)
      stage.originals.emplace(position, stage.parameters.at(position));
    for (int64_t index : plan.buffers) stage.module_buffers.push_back(buffers.at(index));
  }
}

// Until its backward, a mini-batch has tensors that several streams use, and a device may have failed since its forward.
MiniBatch::~MiniBatch() {
  if (step_gradients || (can_run_backward_ && plan_->has_backward())) transport_->survive_failures();
}

void MiniBatch::make_random_keys() {
  if (transport_->is_cpu()) return;
  for (size_t i = 0; i < stages_.size(); ++i) {
    Tensors keys{host_keys(i)};
    if (!keys.front().defined()) continue;
    const Stream& work = transport_->work(static_cast<int32_t>(i));
    const Stream::Guard current(work);
    stages_[i].keys = keys.front().to(work.device(), /*non_blocking=*/true);
    free_shared(keys);
  }
}

void MiniBatch::replicate() {
  for (size_t i = 0; i < stages_.size(); ++i) {
    for (const auto& [position, original] : stages_[i].originals) {
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
  return Stream::current_on(device);
}

at::Tensor MiniBatch::host_keys(size_t index) {
  const StagePlan& plan = plan_->stages[index];
  if (!plan.has_fixed_chains) return {};
  std::vector<int64_t>& first = stages_[index].first_key_rows;
  first.clear();
  std::vector<std::pair<int64_t, int64_t>> keyed;  // micro-batch, first layer
  for (size_t m = 0; m < plan.chains.size(); ++m) {
    first.push_back(static_cast<int64_t>(keyed.size()));
    for (const auto& segment : plan.chains[m]) {
      if (const auto first_layer = segment->random_key_layer()) keyed.emplace_back(m, *first_layer);
    }
  }
  if (keyed.empty()) return {};
  const at::TensorOptions options = at::TensorOptions(at::kLong).pinned_memory(!plan.device.is_cpu());
  at::Tensor keys = at::empty({static_cast<int64_t>(keyed.size()), kKeyWords}, options);
  int64_t* row = keys.mutable_data_ptr<int64_t>();
  for (const auto& [microbatch, first_layer] : keyed) {
    write_key(row, stages_[index].key(), microbatch, first_layer);
    row += kKeyWords;
  }
  return keys;
}

at::Tensor MiniBatch::random_key(const Action& action, int64_t first_layer) const {
  const StageState& stage = stages_[action.stage];
  const int32_t m = action.microbatch;
  if (!stage.keys.defined()) return make_key(stage.key(), m, first_layer, stage.device);
  // The last context is this segment's own.
  const std::vector<SegmentContext>& contexts = stage.microbatch_states[m].contexts;
  const auto before = std::count_if(contexts.begin(), contexts.end() - 1, [](const SegmentContext& context) {
    return context.segment->random_key_layer().has_value();
  });
  return stage.keys.select(0, stage.first_key_rows[m] + before);
}

void MiniBatch::begin_forward(std::vector<Tensors> microbatches) {
  GPIPE_CHECK(static_cast<int64_t>(microbatches.size()) == plan_->num_microbatches(), "a plan for ",
              plan_->num_microbatches(), " micro-batches got inputs for ", microbatches.size());
  for (size_t i = 0; i < stages_.size(); ++i) {
    StageState& stage = stages_[i];
    stage.microbatch_states = std::vector<MicroBatchState>(microbatches.size());
    stage.release_programs();
    stage.reached.assign(stage.parameters.size(), false);
    stage.new_versions.clear();
    stage.forward = {stage.module_buffers};
    for (const Statistics& own : plan_->stages[i].statistics)
      stage.forward.statistics.push_back(own.begin(stage.forward.buffers));
  }
  skips_.assign(microbatches.size(), Skips(plan_->num_skips));
  output_memory_.reset();
  for (size_t m = 0; m < microbatches.size(); ++m) {
    stages_.front().microbatch_states[m].received = {std::move(microbatches[m]), plan_->inputs};
  }
  thread_state_.emplace(plan_->num_threads);
  phase_ = Phase::forward;
}

std::vector<Boundary> MiniBatch::take_outputs() {
  std::vector<Boundary> outputs;
  for (MicroBatchState& microbatch_state : stages_.back().microbatch_states)
    outputs.push_back(std::move(microbatch_state.outputs));
  return outputs;
}

Boundary MiniBatch::join(const std::vector<Boundary>& outputs) {
  const std::optional<OutputMemory> memory = std::exchange(output_memory_, std::nullopt);
  return concatenate(outputs, plan_->cat_dim, memory);
}

void MiniBatch::end_forward() {
  at::NoGradGuard no_grad;
  for (size_t index = 0; index < stages_.size(); ++index) {
    StageState& stage = stages_[index];
    ForwardState& forward = stage.forward;
    const std::vector<Statistics>& statistics = plan_->stages[index].statistics;
    for (size_t i = 0; i < statistics.size(); ++i) statistics[i].end(forward.buffers, forward.statistics[i]);
    for (size_t i = 0; i < forward.buffers.size(); ++i) stage.write_buffer(static_cast<int64_t>(i));
    forward = {};
    stage.release_programs();
  }
  record_buffer_versions();
  phase_ = Phase::idle;
  can_run_backward_ = true;
}

void MiniBatch::end_stage_forward(int32_t index) {
  StageState& stage = stages_[index];
  stage.release_programs();
  for (size_t i = 0; i < stage.module_buffers.size(); ++i) {
    GPIPE_CHECK(
        stage.forward.buffers[i].is_same(stage.module_buffers[i]), "stage ", index,
        " writes a buffer of shape ", stage.module_buffers[i].sizes(),
        " in its forward, as batch norm does in training mode, and model.stream() runs later mini-batches "
        "before the buffer is written; call model.eval(), or model(x) for each mini-batch");
  }
}

void MiniBatch::record_buffer_versions() {
  for (StageState& stage : stages_) {
    for (const MicroBatchState& microbatch_state : stage.microbatch_states) {
      for (const SegmentContext& context : microbatch_state.contexts) {
        for (size_t i = 0; i < context.buffers.size(); ++i) {
          const at::Tensor& own = stage.module_buffers[i];
          if (context.buffers[i].is_same(own) && !own.is_inference())
            stage.buffer_versions[i] = {own._version(), own.const_data_ptr()};
        }
      }
    }
  }
}

void MiniBatch::abandon() {
  if (phase_ == Phase::forward) restore_snapshots();
  for (StageState& stage : stages_) {
    can_run_backward_ = can_run_backward_ && stage.retains_graph;
    stage.forward = {};
    stage.backward = {};
    stage.release_programs();
    for (MicroBatchState& microbatch_state : stage.microbatch_states) {
      microbatch_state.received = {};
      microbatch_state.outputs = {};
      microbatch_state.tangents.clear();
      microbatch_state.input_gradients.clear();
      microbatch_state.arriving_inputs.reset();
      microbatch_state.arriving_gradients.reset();
      microbatch_state.arriving_skips.clear();
      microbatch_state.arriving_skip_gradients.clear();
    }
  }
  if (!can_run_backward_) {
    for (StageState& stage : stages_) stage.microbatch_states.clear();
    memory_owner_.reset();
  }
  for (Skips& skips : skips_) skips.assign(skips.size(), {});
  output_memory_.reset();
  phase_ = Phase::idle;
}

// Restores the module's own buffers, because layers in Python write them in place.
void MiniBatch::restore_snapshots() {
  for (StageState& stage : stages_) {
    auto& snapshots = stage.forward.snapshots;
    for (auto it = snapshots.rbegin(); it != snapshots.rend(); ++it) it->first->restore(it->second);
    snapshots.clear();
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

void MiniBatch::enter_stage(int32_t stage, const std::function<void()>& run_actions) {
  const Stream::Guard current(transport_->work(stage));
  thread_state_->run(run_actions);
  if (remote_) remote_->end_stage(stage);
}

void MiniBatch::begin_exchange(std::shared_ptr<Channels> channels, const Actions& actions) {
  const RemoteStages::Owned owned{*plan_, *transport_, stages_, skips_};
  remote_ = std::make_unique<RemoteStages>(owned, std::move(channels), actions);
}

int64_t MiniBatch::cancelled_by(int64_t rank) const { return remote_ ? remote_->cancelled_by(rank) : rank; }

void MiniBatch::cancel_from(int64_t rank) {
  if (remote_) remote_->cancel_from(rank);
}

void MiniBatch::run(const Action& action, CancellationToken& token) {
  Tensors boundary = transport_->is_cpu() ? Tensors() : boundary_tensors(action);
  std::optional<StreamEvent::Timing> timing;
  if (clock_) {
    timing.emplace();
    begins_[action.stage] = StreamEvent(transport_->work(action.stage));
  }
  try {
    if (remote_) remote_->before(action);
    run_action(action, token);
  } catch (...) {
    transport_->survive_failures();
    throw;
  }
  free_shared(boundary);
  stages_[action.stage].latest_rank = action.rank;
}

void MiniBatch::set_clock(std::shared_ptr<const DeviceClock> clock) {
  clock_ = std::move(clock);
  begins_.assign(clock_ ? stages_.size() : 0, {});
}

Observed MiniBatch::observe(const Action& action) const {
  Observed observed{kept(action), nullptr};
  if (!clock_ || transport_->work(action.stage).is_cpu()) return observed;
  const StreamEvent::Timing timing;
  StreamEvent arrival;
  const int32_t receiver = action.kind == ActionKind::send_forward    ? action.stage + 1
                           : action.kind == ActionKind::send_backward ? action.stage - 1
                                                                      : -1;
  if (receiver >= 0) arrival = stages_[receiver].microbatch_states[action.microbatch].copy_done;
  observed.times = std::make_shared<StreamTimes>(clock_, begins_[action.stage],
                                                 StreamEvent(transport_->work(action.stage)), arrival);
  return observed;
}

Tensors MiniBatch::boundary_tensors(const Action& action) const {
  const StageState& stage = stages_[action.stage];
  const MicroBatchState& state = stage.microbatch_states[action.microbatch];
  Tensors found;
  switch (action.kind) {
    case ActionKind::forward:
      return state.received.tensors;
    case ActionKind::send_forward:
      return state.outputs.tensors;
    case ActionKind::send_backward:
      return state.input_gradients;
    case ActionKind::backward:
    case ActionKind::backward_inputs:
    case ActionKind::backward_weights:
      found = state.tangents;
      if (stage.backward.open)
        found.insert(found.end(), stage.backward.open->boundary.begin(), stage.backward.open->boundary.end());
      for (const SegmentContext& context : state.contexts) {
        for (const Tensors* tensors : {&context.inputs, &context.shared, &context.tangents})
          found.insert(found.end(), tensors->begin(), tensors->end());
      }
      return found;
    default:
      return {};
  }
}

void MiniBatch::run_action(const Action& action, CancellationToken& token) {
  at::RecordFunction range(at::RecordScope::USER_SCOPE);
  if (range.isActive()) range.before("PP:" + action.name());
  const int32_t m = action.microbatch;
  MicroBatchState& microbatch_state = stages_[action.stage].microbatch_states[m];
  switch (action.kind) {
    case ActionKind::forward:
      return forward(action, token);
    case ActionKind::recompute:
    case ActionKind::backward:
    case ActionKind::backward_inputs:
    case ActionKind::backward_weights:
      return backward(action, token);
    case ActionKind::send_forward: {
      if (remote_ && remote_->exchange(action)) return;
      MicroBatchState& next = stages_[action.stage + 1].microbatch_states[m];
      send(microbatch_state.outputs.tensors, action.stage, action.stage + 1, Direction::forward, next);
      next.received = std::move(microbatch_state.outputs);
      return;
    }
    case ActionKind::send_backward: {
      if (remote_ && remote_->exchange(action)) return;
      MicroBatchState& before = stages_[action.stage - 1].microbatch_states[m];
      send(microbatch_state.input_gradients, action.stage, action.stage - 1, Direction::backward, before);
      before.tangents = std::move(microbatch_state.input_gradients);
      return;
    }
    case ActionKind::recv_forward:
    case ActionKind::recv_backward:
      if (remote_) remote_->exchange(action);
      transport_->receive(action.stage,
                          microbatch_state.copy_done);  // the sender has stored the tensors here
      return;
  }
}

void MiniBatch::send(Tensors& tensors, int32_t sender, int32_t receiver, Direction direction,
                     MicroBatchState& receiving) const {
  if (!transport_->is_cpu())
    receiving.copy_done =
        transport_->send(tensors, sender, StreamEvent(transport_->work(sender)), receiver, direction);
}

void MiniBatch::mark_ready(const std::vector<int64_t>& indices, Skips& skips, int32_t stage) const {
  if (transport_->is_cpu()) return;
  for (int64_t index : indices) {
    skips[index].stage = stage;
    skips[index].ready = StreamEvent(transport_->work(stage));
  }
}

void MiniBatch::fetch_skips(const std::vector<int64_t>& indices, Skips& skips, int32_t stage) const {
  if (transport_->is_cpu()) return;
  for (int64_t index : indices) {
    Skip& skip = skips[index];
    if (skip.stage == stage) continue;
    Tensors sent{skip.tensor, skip.gradient}, tensors = sent;
    const StreamEvent copy_done = transport_->send(tensors, skip.stage, skip.ready, stage, Direction::skip);
    skip.tensor = std::move(tensors[0]);
    skip.gradient = std::move(tensors[1]);
    skip.stage = stage;
    free_shared(sent);
    transport_->receive(stage, copy_done);
  }
}

const Tensors& MiniBatch::memory_for(const Action& action, const Segment& segment) {
  static const Tensors none;
  const StagePlan& plan = plan_->stages[action.stage];
  if (action.stage != stages_.back().index || !plan.has_fixed_chains || plan_->token || plan_->cat_dim != 0 ||
      plan.chains.at(action.microbatch).back().get() != &segment)
    return none;
  if (!output_memory_) {
    std::vector<std::vector<const Layout*>> layouts;
    for (const Chain& chain : plan.chains) layouts.push_back(chain.back()->placeable());
    output_memory_.emplace(layouts, plan.device);
  }
  return output_memory_->of(action.microbatch);
}

void MiniBatch::forward(const Action& action, CancellationToken& token) {
  const StagePlan& plan = plan_->stages[action.stage];
  StageState& stage = stages_[action.stage];
  MicroBatchState& microbatch_state = stage.microbatch_states[action.microbatch];
  Skips& skips = skips_[action.microbatch];
  if (remote_) remote_->take_skips(action);
  Boundary value = std::move(microbatch_state.received);
  for (int64_t layer = 0; layer < plan.num_layers; layer = microbatch_state.contexts.back().segment->end) {
    const auto segment =
        plan.segment(action.microbatch, microbatch_state.contexts.size(), layer, value, skips);
    SegmentContext& context = microbatch_state.contexts.emplace_back();
    context.segment = segment;
    fetch_skips(segment->pops, skips, action.stage);
    value = pop(*segment, skips, std::move(value));
    if (!segment->pops.empty()) context.input_form = value.form;
    if (const auto first_layer = segment->random_key_layer()) context.key = random_key(action, *first_layer);
    const Tensors taken = skips.empty() && value.tensors.size() < 2 ? Tensors() : value.tensors;
    Segment::Result result =
        segment->forward({action, stage, context, token}, std::move(value), memory_for(action, *segment));
    if (!taken.empty()) check_not_shared(*segment, skips, taken, result.written_inputs);
    if (!segment->stashes.empty()) context.output_form = result.outputs.form;
    value = stash(*segment, skips, std::move(result.outputs));
    mark_ready(segment->stashes, skips, action.stage);
  }
  microbatch_state.outputs = std::move(value);
  // Other stages may have begun to receive their gradients.
  if (&stage == &stages_.back())
    keep_gradient_of_loss(microbatch_state.tangents, microbatch_state.outputs.tensors);
}

}  // namespace gpipe_fast
