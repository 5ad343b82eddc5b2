// The exchange of tensors with the stages of other processes, in one run of a mini-batch.
#pragma once

#include "engine/engine.h"
#include "pipeline/plan.h"
#include "pipeline/segment.h"
#include "pipeline/stage_state.h"
#include "transport/channels.h"
#include "transport/transport.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace gpipe_fast {

class LoweredSegment;

// Called by the workers of the mini-batch's stages.
class RemoteStages {
 public:
  // The tensors of a mini-batch, which outlives this object. A stage's worker uses its own and those that the
  // stage next to it receives.
  struct Owned {
    const Plan& plan;
    const Transport& transport;
    std::vector<StageState>& stages;
    std::vector<Skips>& skips;  // by micro-batch
  };
  // For one run of these actions.
  RemoteStages(const Owned& owned, std::shared_ptr<Channels> channels, const Actions& actions);

  // Call before each action.
  void before(const Action& action);
  // Runs a SEND or RECV between two processes: sends from a stage here, or receives what another stage sends to it. Does
  // nothing, and returns false, if both stages are here. If transfers are on a device, a RECV makes the stage wait.
  bool exchange(const Action& action);
  // Wait for what a stage pops, and for the gradients of what it stashed, and store them with the micro-batch.
  void take_skips(const Action& action);
  void take_skip_gradients(const Action& action);
  // Gives the gradients of the outputs the layouts that the segment was lowered for.
  void conform_gradients(const Action& action, Tensors& tangents) const;
  // Call after the last action of a stage. After the last one of this process, sums the gradients of parameters that
  // stages in other processes share, and waits until everything is sent.
  void end_stage(int32_t stage);

  // As those of `Work`.
  int64_t cancelled_by(int64_t rank) const;
  void cancel_from(int64_t rank) { channels_->abort_from(rank); }

 private:
  // Returns whether a stage is in another process.
  bool is_remote(int32_t stage) const { return !channels_->has(stage); }
  const LoweredSegment& segment_of(int32_t stage, int32_t microbatch) const;
  MicroBatchState& state_of(int32_t stage, int32_t microbatch) const;
  void send_outputs(const Action& action);
  void send_gradients(const Action& action);
  // Begins to receive what an action and the next ones of its kind and stage receive.
  void receive_ahead(const Action& action);
  // Begin to receive the boundary of a micro-batch, or its gradients, and skip tensors: from one stage, or from all
  // unless that has begun.
  void begin_inputs(int32_t microbatch, int32_t receiver, std::optional<int32_t> sender);
  void begin_gradients(int32_t microbatch, int32_t receiver, std::optional<int32_t> sender);
  void receive_inputs(const Action& action, int32_t receiver);
  void receive_gradients(const Action& action, int32_t receiver);
  // Begins to receive skip tensors from the stages at one end of their skip connections, or from one of these.
  void receive_skips(std::vector<ArrivingSkip> skips, int32_t std::pair<int32_t, int32_t>::* end,
                     std::optional<int32_t> sender, int32_t receiver,
                     std::vector<ArrivingSkip>& arriving) const;
  // Sends a tensor that the stage's work stream computes, and frees it unless others refer to it.
  void send_to(int32_t sender, int32_t receiver, at::Tensor tensor, int64_t rank) const;
  at::Tensor begin_receive(const Layout& layout, int32_t sender, int32_t receiver, Direction direction,
                           Arrivals& arrivals) const;
  // Waits for tensors. Returns the stream event after which the stage can read them.
  StreamEvent wait_for(const Arrivals& arrivals, int32_t receiver, Direction direction, int64_t rank) const;
  void take_arriving(std::vector<ArrivingSkip>& arriving, const Action& action,
                     at::Tensor Skip::* destination);
  // Each process computes the same sum.
  void sum_ties();
  // Sums the gradients of the stages here over their replicas, or averages them after a backward of the caller's own
  // loss; see remote_replicas.cpp.
  void sum_replicas();
  void begin_sums(StageState& stage, Arrivals& sums) const;
  void begin_sums_of_gathered(StageState& stage, Arrivals& sums) const;

  const Owned owned_;
  const std::shared_ptr<Channels> channels_;
  const Actions& actions_;
  size_t next_receive_ = 0;                     // the first of the actions' receives that has not begun
  std::atomic<int32_t> unfinished_stages_ = 0;  // of this process
};

}  // namespace gpipe_fast
