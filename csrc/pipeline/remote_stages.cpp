// The transfers between stages in different processes.
//
// A process has the chains of its own stages only. It receives what others send in the layouts for which the own stages'
// segments were lowered. Skip tensors and their gradients follow the boundary of their micro-batch, those for near stages
// first, and those for one stage in the order of their indices:
//
//   0SEND_F2   boundary to stage 1, then skip tensors to the stages that pop them
//   2SEND_B2   boundary gradient to stage 1, then gradients of skip tensors to the stages that stashed them
//
// The gradients of tied parameters follow when the process's last stage has ended, and then the sums over replicas.
//
// If tensors travel through the host, the workers of the stages next to the own ones receive what these send (see
// Actions). They begin the next receives before they wait, because gloo sends a tensor only when it knows that the other
// side expects it: otherwise each tensor would take three times the latency of the network.
//
// If transfers are on a device, each ends only when its other end has begun, and may hold up those behind it. The host
// can have to wait for them in any action: an allocation that frees memory waits for all that the device has begun, and
// a launch waits while the device's queue is full. So all processes begin transfers in one order, that of the ranks of
// the SENDs: a stage begins to receive a tensor before its first action that ranks higher than the SEND, and only its
// stream waits in the RECV. Then the other ends of what a process waits for wait only for earlier transfers.
//
//   rank                         4        5        6        7        8        9
//   process of stage 0          0F1    0SEND_F1          0RECV_B0   0B0
//   process of stage 1          1B0       |    1SEND_B0                    1RECV_F1
//                                         +- begins to receive F1 before 1SEND_B0
#include "pipeline/remote_stages.h"

#include "check.h"
#include "device/failure.h"
#include "engine/slots.h"
#include "pipeline/lowered_segment.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <utility>

namespace gpipe_fast {
namespace {

// How many boundary tensors a process may expect from a stage before the one that it waits for has arrived. Each takes
// memory.
constexpr int kReceivesAhead = 3;

using SkipEnds = std::pair<int32_t, int32_t>;

// Returns indices of skip connections: those whose other end is nearest to the stage first, then by index.
std::vector<int64_t> nearest_first(std::vector<int64_t> indices, int32_t stage,
                                   const std::vector<SkipEnds>& skip_ends, int32_t SkipEnds::* other_end) {
  const auto key = [&](int64_t index) {
    return std::make_pair(std::abs(skip_ends.at(index).*other_end - stage), index);
  };
  std::sort(indices.begin(), indices.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
  return indices;
}

// Copies gradients that arrived in other layouts than a segment was lowered for. The other processes count on those.
void conform(const LoweredSegment& segment, Tensors& tangents) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  tangents.resize(segment.tangent_layouts.size());
  for (size_t i = 0; i < tangents.size(); ++i) {
    const std::optional<Layout>& layout = segment.tangent_layouts[i];
    GPIPE_CHECK(
        layout.has_value() == tangents[i].defined(), "output ", i, " of the last stage ",
        layout ? "got no gradient" : "got a gradient, but cannot need one",
        "; with a mesh, every process has to know which outputs get one: let the loss depend on all outputs "
        "that require gradients, or detach them in the last layer");
    if (layout && !layout->matches(tangents[i]))
      tangents[i] = layout->empty(tangents[i].device()).copy_(tangents[i]);
  }
}

}  // namespace

RemoteStages::RemoteStages(const Owned& owned, std::shared_ptr<Channels> channels, const Actions& actions)
    : owned_(owned), channels_(std::move(channels)), actions_(actions) {
  for (const StageState& stage : owned_.stages) unfinished_stages_ += is_remote(stage.index) ? 0 : 1;
}

const LoweredSegment& RemoteStages::segment_of(int32_t stage, int32_t microbatch) const {
  return dynamic_cast<const LoweredSegment&>(*owned_.plan.stages[stage].chains.at(microbatch).front());
}

MicroBatchState& RemoteStages::state_of(int32_t stage, int32_t microbatch) const {
  return owned_.stages[stage].microbatch_states[microbatch];
}

// If transfers are on a device, an abort ends them all.
int64_t RemoteStages::cancelled_by(int64_t rank) const {
  return channels_->is_on_device() ? Cancellation::kEverything : rank;
}

// If transfers are on a device: begins to receive, on all stages here, what SENDs of lower ranks send.
void RemoteStages::before(const Action& action) {
  if (!channels_->is_on_device() || is_remote(action.stage)) return;
  const std::vector<Receive>& receives = actions_.receives();
  for (; next_receive_ < receives.size() && receives[next_receive_].rank < action.rank; ++next_receive_) {
    const Receive& each = receives[next_receive_];
    if (each.kind == ActionKind::send_forward) {
      begin_inputs(each.microbatch, each.receiver, each.sender);
    } else {
      begin_gradients(each.microbatch, each.receiver, each.sender);
    }
  }
}

bool RemoteStages::exchange(const Action& action) {
  const bool to_next = action.kind == ActionKind::send_forward || action.kind == ActionKind::recv_backward;
  if (!is_remote(action.stage) && !is_remote(to_next ? action.stage + 1 : action.stage - 1)) return false;
  // On a device, the stage's RECV waits for the tensors; else the worker of the sending stage does, in the SEND.
  const bool receives = is_remote(action.stage) != channels_->is_on_device();
  try {
    if (receives && !channels_->is_on_device()) receive_ahead(action);
    switch (action.kind) {
      case ActionKind::send_forward:
        if (!is_remote(action.stage)) {
          send_outputs(action);
        } else if (receives) {
          receive_inputs(action, action.stage + 1);
        }
        break;
      case ActionKind::send_backward:
        if (!is_remote(action.stage)) {
          send_gradients(action);
        } else if (receives) {
          receive_gradients(action, action.stage - 1);
        }
        break;
      case ActionKind::recv_forward:
        if (receives) receive_inputs(action, action.stage);
        break;
      default:  // recv_backward
        if (receives) receive_gradients(action, action.stage);
    }
  } catch (const Aborted&) {
    throw Cancelled();
  }
  return true;
}

void RemoteStages::end_stage(int32_t stage) {
  if (is_remote(stage) || --unfinished_stages_ > 0) return;
  try {
    sum_ties();
    sum_replicas();
    channels_->flush();
  } catch (const Aborted&) {
    throw Cancelled();
  }
}

void RemoteStages::take_skips(const Action& action) {
  take_arriving(state_of(action.stage, action.microbatch).arriving_skips, action, &Skip::tensor);
}

void RemoteStages::take_skip_gradients(const Action& action) {
  take_arriving(state_of(action.stage, action.microbatch).arriving_skip_gradients, action, &Skip::gradient);
}

void RemoteStages::send_to(int32_t sender, int32_t receiver, at::Tensor tensor, int64_t rank) const {
  const Stream& out = owned_.transport.out(sender);
  out.wait(StreamEvent(owned_.transport.work(sender)));
  {
    const Stream::Guard current(out);
    channels_->send(tensor, sender, receiver, rank);
  }
  out.record_use(tensor);
  Tensors sent{std::move(tensor)};
  free_shared(sent);
}

void RemoteStages::send_outputs(const Action& action) {
  const LoweredSegment& segment = segment_of(action.stage, action.microbatch);
  MicroBatchState& state = state_of(action.stage, action.microbatch);
  for (at::Tensor& tensor : state.outputs.tensors)
    send_to(action.stage, action.stage + 1, std::exchange(tensor, {}), action.rank);
  state.outputs = {};
  for (int64_t index :
       nearest_first(segment.stashes, action.stage, owned_.plan.skip_ends, &SkipEnds::second)) {
    at::Tensor& tensor = owned_.skips[action.microbatch].at(index).tensor;
    const int32_t receiver = owned_.plan.skip_ends.at(index).second;
    if (tensor.defined() && is_remote(receiver))
      send_to(action.stage, receiver, std::exchange(tensor, {}), action.rank);
  }
}

void RemoteStages::send_gradients(const Action& action) {
  const LoweredSegment& segment = segment_of(action.stage, action.microbatch);
  MicroBatchState& state = state_of(action.stage, action.microbatch);
  for (at::Tensor& tensor : state.input_gradients) {
    if (tensor.defined()) send_to(action.stage, action.stage - 1, std::exchange(tensor, {}), action.rank);
  }
  state.input_gradients.clear();
  for (int64_t index : nearest_first(segment.pops, action.stage, owned_.plan.skip_ends, &SkipEnds::first)) {
    at::Tensor& tensor = owned_.skips[action.microbatch].at(index).gradient;
    const int32_t receiver = owned_.plan.skip_ends.at(index).first;
    if (tensor.defined() && is_remote(receiver))
      send_to(action.stage, receiver, std::exchange(tensor, {}), action.rank);
  }
}

// Allocated on the in stream, which waits for nothing but these transfers, so that a device can receive ahead of the
// stage's work.
at::Tensor RemoteStages::begin_receive(const Layout& layout, int32_t sender, int32_t receiver,
                                       Direction direction, Arrivals& arrivals) const {
  const Stream::Guard current(owned_.transport.in(receiver, direction));
  at::Tensor tensor = layout.empty(owned_.transport.work(receiver).device());
  if (auto arrival = channels_->receive(tensor, sender, receiver)) arrivals.push_back(std::move(arrival));
  owned_.transport.work(receiver).record_use(tensor);
  return tensor;
}

StreamEvent RemoteStages::wait_for(const Arrivals& arrivals, int32_t receiver, Direction direction,
                                   int64_t rank) const {
  // A transfer on a device waits for the in stream, which must not wait for an earlier transfer.
  const Stream& stream =
      channels_->is_on_device() ? owned_.transport.work(receiver) : owned_.transport.in(receiver, direction);
  const Stream::Guard current(stream);
  for (const auto& arrival : arrivals) arrival->wait(rank);
  return StreamEvent(stream);
}

void RemoteStages::receive_ahead(const Action& action) {
  const std::vector<Action>& own = actions_.of(action.stage);
  auto next = std::lower_bound(own.begin(), own.end(), action.rank,
                               [](const Action& each, int64_t rank) { return each.rank < rank; });
  for (int left = 1 + kReceivesAhead; next != own.end() && left > 0; ++next) {
    if (next->kind != action.kind) continue;
    --left;
    if (action.kind == ActionKind::send_forward) {
      begin_inputs(next->microbatch, action.stage + 1, std::nullopt);
    } else {
      begin_gradients(next->microbatch, action.stage - 1, std::nullopt);
    }
  }
}

void RemoteStages::receive_inputs(const Action& action, int32_t receiver) {
  MicroBatchState& state = state_of(receiver, action.microbatch);
  const Arrivals arrivals = *std::exchange(state.arriving_inputs, {});
  state.copy_done = wait_for(arrivals, receiver, Direction::forward, action.rank);
}

void RemoteStages::begin_inputs(int32_t microbatch, int32_t receiver, std::optional<int32_t> sender) {
  const LoweredSegment& segment = segment_of(receiver, microbatch);
  MicroBatchState& state = state_of(receiver, microbatch);
  const BoundaryForm& form = *segment.input_form;
  const bool from_neighbour = sender.value_or(receiver - 1) == receiver - 1;
  if (from_neighbour) {
    if (state.arriving_inputs) return;
    // In the state, where tensors outlive an error until it is known whether the device has failed.
    state.received = {{}, std::make_shared<BoundaryForm>(BoundaryForm{form.structure, form.needs_gradient})};
    Arrivals& arrivals = state.arriving_inputs.emplace();
    for (size_t i = 0; i < form.needs_gradient.size(); ++i)
      state.received.tensors.push_back(
          begin_receive(segment.inputs[i], receiver - 1, receiver, Direction::forward, arrivals));
  }
  size_t next = form.needs_gradient.size();
  std::vector<ArrivingSkip> skips(segment.pops.size());
  for (size_t i = 0; i < skips.size(); ++i) {
    skips[i] = {segment.pops[i], std::nullopt, form.skips[i].value_or(false)};
    if (form.skips[i]) skips[i].layout = segment.inputs[next++];
  }
  receive_skips(std::move(skips), &SkipEnds::first, sender, receiver, state.arriving_skips);
}

void RemoteStages::receive_gradients(const Action& action, int32_t receiver) {
  MicroBatchState& state = state_of(receiver, action.microbatch);
  const Arrivals arrivals = *std::exchange(state.arriving_gradients, {});
  state.copy_done = wait_for(arrivals, receiver, Direction::backward, action.rank);
}

void RemoteStages::begin_gradients(int32_t microbatch, int32_t receiver, std::optional<int32_t> sender) {
  const LoweredSegment& segment = segment_of(receiver, microbatch);
  MicroBatchState& state = state_of(receiver, microbatch);
  const BoundaryForm& form = *segment.output_form;
  const bool from_neighbour = sender.value_or(receiver + 1) == receiver + 1;
  if (from_neighbour) {
    if (state.arriving_gradients) return;
    Arrivals& arrivals = state.arriving_gradients.emplace();
    for (size_t i = 0; i < form.needs_gradient.size(); ++i) {
      const std::optional<Layout>& layout = segment.tangent_layouts.at(i);
      state.tangents.push_back(
          layout ? begin_receive(*layout, receiver + 1, receiver, Direction::backward, arrivals)
                 : at::Tensor());
    }
  }
  size_t next = form.needs_gradient.size();
  std::vector<ArrivingSkip> skips;
  for (size_t i = 0; i < segment.stashes.size(); ++i) {
    if (form.skips[i]) skips.push_back({segment.stashes[i], segment.tangent_layouts.at(next++)});
  }
  receive_skips(std::move(skips), &SkipEnds::second, sender, receiver, state.arriving_skip_gradients);
}

void RemoteStages::receive_skips(std::vector<ArrivingSkip> skips, int32_t SkipEnds::* end,
                                 std::optional<int32_t> sender, int32_t receiver,
                                 std::vector<ArrivingSkip>& arriving) const {
  std::sort(skips.begin(), skips.end(),
            [](const ArrivingSkip& a, const ArrivingSkip& b) { return a.index < b.index; });
  for (ArrivingSkip& skip : skips) {
    const int32_t from = owned_.plan.skip_ends.at(skip.index).*end;
    // The skip tensors that the caller gives are here.
    if (!skip.layout || from < 0 || !is_remote(from) || from != sender.value_or(from)) continue;
    skip.tensor = begin_receive(*skip.layout, from, receiver, Direction::skip, skip.arrivals);
    arriving.push_back(std::move(skip));
  }
}

void RemoteStages::take_arriving(std::vector<ArrivingSkip>& arriving, const Action& action,
                                 at::Tensor Skip::* destination) {
  try {
    for (ArrivingSkip& arrived : arriving) {
      owned_.transport.receive(action.stage,
                               wait_for(arrived.arrivals, action.stage, Direction::skip, action.rank));
      Skip& skip = owned_.skips[action.microbatch].at(arrived.index);
      skip.*destination = std::move(arrived.tensor);
      skip.stage = action.stage;
      if (destination == &Skip::tensor) skip.needs_gradient = arrived.needs_gradient;
    }
  } catch (const Aborted&) {
    throw Cancelled();
  }
  arriving.clear();
}

void RemoteStages::sum_ties() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const Tie& tie : owned_.plan.ties) {
    if (owned_.stages[tie.own.front().first].backward.gradients.empty()) return;  // a forward alone
    // In the order of a backward, the last stage first, as in end_backward().
    std::map<int32_t, at::Tensor, std::greater<>> by_stage;
    const auto& [first, position] = tie.own.front();
    const Stream& work = owned_.transport.work(first);
    const Stream::Guard current(work);
    try {
      for (const auto& [stage, index] : tie.own) {
        at::Tensor gradient = std::exchange(owned_.stages[stage].backward.gradients.at(index), {});
        work.wait(StreamEvent(owned_.transport.work(stage)));
        work.record_use(gradient);
        by_stage[stage] = gradient.resolve_conj().contiguous();
        owned_.transport.work(stage).wait(StreamEvent(work));  // a send waits for its stage's stream
      }
      const Layout layout = Layout::of(by_stage[first]);
      // All processes begin these transfers in the same order: by sender, then by receiver.
      std::set<std::pair<int32_t, int32_t>> transfers;
      for (const auto& [stage, gradient] : by_stage) {
        for (int32_t receiver : tie.receivers) transfers.emplace(stage, receiver);
      }
      for (int32_t sender : tie.senders) transfers.emplace(sender, first);
      Arrivals arrivals;
      for (const auto& [sender, receiver] : transfers) {
        if (is_remote(sender)) {
          by_stage[sender] = begin_receive(layout, sender, receiver, Direction::skip, arrivals);
        } else {
          send_to(sender, receiver, by_stage[sender], kAfterAllActions);
        }
      }
      owned_.transport.receive(first, wait_for(arrivals, first, Direction::skip, kAfterAllActions));
      at::Tensor& sum = owned_.stages[first].backward.gradients.at(position);
      for (const auto& [stage, part] : by_stage) sum = sum.defined() ? at::add(sum, part) : part;
    } catch (...) {
      owned_.transport.survive_failures();
      throw;
    }
  }
}

void RemoteStages::conform_gradients(const Action& action, Tensors& tangents) const {
  const LoweredSegment& segment = segment_of(action.stage, action.microbatch);
  if (!segment.accepts_gradients(tangents)) conform(segment, tangents);
}

}  // namespace gpipe_fast
