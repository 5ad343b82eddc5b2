// A mini-batch, from its forward to its backward: the work of the engine's actions.
//
// Boundary tensors are stored with the stage that receives them; a SEND moves them there:
//
//   stage 0, micro-batch m   [ contexts ]   kept for 0Bm   tangents <-------+
//                              | 0Fm                          | 0Bm         | 1SEND_Bm
//                            outputs --+ 0SEND_Fm            ...   input_gradients
//                                      |                                    | 1Bm
//   stage 1, micro-batch m  received <-+ --1Fm--> [ contexts ]   kept for 1Bm
//
// Each segment of the stage has one context. Nearly every stage is a single segment.
//
// Stashed skip tensors are stored with the micro-batch. They need no slots, because a pop follows a chain of sends
// that begins after the stash.
#pragma once

#include "engine/engine.h"
#include "pipeline/device_clock.h"
#include "pipeline/microbatches.h"
#include "pipeline/plan.h"
#include "pipeline/remote_stages.h"
#include "pipeline/stage_state.h"
#include "pipeline/thread_state.h"
#include "transport/channels.h"
#include "transport/transport.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gpipe_fast {

// Call begin_forward(), run the forward actions on the engine, and call end_forward(); then the same for the
// backward. Only layers in Python need the GIL.
class MiniBatch final : public Work {
 public:
  // `parameters` and `buffers` belong to the module; the plan's stages index them. `key` returns the mini-batch's
  // random key, always the same; it is called only if something is random.
  MiniBatch(std::shared_ptr<const Plan> plan, std::shared_ptr<const Transport> transport,
            const Tensors& parameters, const Tensors& buffers, const std::function<int64_t()>& key);
  ~MiniBatch() override;

  // Call both before the forward's run. make_random_keys() makes the random keys, replicate() copies parameters that
  // live on other stages' devices; both copy on the stages' streams.
  void make_random_keys();
  void replicate();

  // Takes the first stage's boundary inputs, by micro-batch. Workers take over the calling thread's state.
  void begin_forward(std::vector<Tensors> microbatches);
  // Returns the last stage's outputs, by micro-batch. Call once, after the run.
  std::vector<Boundary> take_outputs();
  // Concatenates the outputs. Call once.
  Boundary join(const std::vector<Boundary>& outputs);
  // Writes the module's buffers in place, which increments their autograd versions.
  void end_forward();
  // Ends one stage's forward before end_forward(), if another mini-batch follows in the same run: releases the
  // programs. Called by the stage's worker. Throws if the forward has written buffers, which the other one would not see.
  void end_stage_forward(int32_t stage);

  // Takes the gradients of the last stage's outputs, by micro-batch. Throws if a buffer that the backward reads was
  // changed in place after the forward. The backward frees the forward's tensors as it proceeds, unless `retain`;
  // only then may another backward follow.
  void begin_backward(std::vector<Tensors> microbatches, bool retain);
  struct Gradients {
    std::vector<Tensors> inputs;  // by micro-batch; undefined where no gradient is due
    Tensors parameters;           // the module's; undefined where no gradient is due
  };
  // Sums the gradients of a parameter that several stages use, and rounds gradients that were accumulated in higher
  // precision than their parameter's. `caller_streams`: the calling thread's streams.
  Gradients end_backward(const std::vector<Stream>& caller_streams);

  // Takes the inputs of a run of forwards and backwards: the first stage's boundary inputs, the given skip tensors and
  // the gradients of the loss for each dtype that it may have, all by micro-batch.
  void begin_step(std::vector<Tensors> microbatches, std::vector<Tensors> given,
                  std::vector<Tensors> gradients);
  // The gradients that a step has computed, until a backward takes them.
  std::optional<Gradients> step_gradients;
  // If stages are in different processes: the number of the latest run, which all processes have in common.
  int64_t run_number = 0;

  // Frees the tensors that a backward with `retain` kept.
  void release();

  // Call after a failed run: frees its intermediate tensors, and also those kept by the forward unless the failed
  // run was a backward with `retain`.
  void abandon();

  // Returns the bytes that are currently kept for the backward: boundary inputs, saved tensors, and each
  // micro-batch's buffers. Storage that several tensors share counts once.
  int64_t kept_bytes() const;
  // Reads only what the stage's worker owns after the action. Within a micro-batch, no two saved tensors share storage.
  KeptBytes kept(const Action& action) const;
  Observed observe(const Action& action) const override;
  // From now on, actions on devices are timed by a clock; null ends that.
  void set_clock(std::shared_ptr<const DeviceClock> clock);
  // Returns a text for error messages: what a stage's memory holds, and how to reduce it. Call before abandon().
  std::string describe_memory(int32_t stage) const;

  // Returns, for each of the module's parameters, whether an output depends on it; others get no gradient.
  std::vector<bool> reached() const;
  // Returns whether the latest backward needed no fallback segment.
  bool used_no_fallback() const { return used_no_fallback_; }
  // Returns whether a backward may follow.
  bool can_run_backward() const { return can_run_backward_; }
  const std::shared_ptr<const Plan>& plan() const { return plan_; }
  // Returns the streams of the thread that called the forward.
  const std::vector<Stream>& caller_streams() const { return caller_streams_; }

  // Sets how stages of this process exchange tensors with those of other processes, in a run of these actions. Call
  // before a run; if all stages are here, never.
  void begin_exchange(std::shared_ptr<Channels> channels, const Actions& actions);
  // Call after a failed run: the channels cannot be used any more.
  void end_exchange() { remote_.reset(); }

  void enter_stage(int32_t stage, const std::function<void()>& run_actions) override;
  void run(const Action& action, CancellationToken& token) override;
  int64_t cancelled_by(int64_t rank) const override;
  void cancel_from(int64_t rank) override;

 private:
  friend class CapturedMiniBatch;

  enum class Phase { idle, forward, backward };

  // Sets the gradients of the last stage's outputs, and those of the parameters to none.
  void set_gradients(std::vector<Tensors> microbatches, bool retain);
  // Returns a stage's random keys, one row for each segment that needs one; undefined if none does, or if the stage's
  // chains are not known.
  at::Tensor host_keys(size_t stage);
  Stream stream_on(at::Device device) const;
  at::Tensor random_key(const Action& action, int64_t first_layer) const;
  void record_buffer_versions();
  void restore_snapshots();
  void round_to_dtype(Tensors& gradients, const std::vector<Stream>& caller_streams) const;
  void send(Tensors& tensors, int32_t sender, int32_t receiver, Direction direction,
            MicroBatchState& receiving) const;
  // fetch_skips() transfers skip tensors and gradients that another stage stored to this stage's device and stream.
  // mark_ready() records a stream event for skip tensors and gradients that this stage stored.
  void fetch_skips(const std::vector<int64_t>& indices, Skips& skips, int32_t stage) const;
  void mark_ready(const std::vector<int64_t>& indices, Skips& skips, int32_t stage) const;
  void run_action(const Action& action, CancellationToken& token);
  // Returns the boundary tensors that an action may free. Other streams have used them.
  Tensors boundary_tensors(const Action& action) const;
  void forward(const Action& action, CancellationToken& token);
  // Returns the memory into which a segment writes its outputs, if they are those of the mini-batch.
  const Tensors& memory_for(const Action& action, const Segment& segment);
  void backward(const Action& action, CancellationToken& token);
  void backward_inputs(const Action& action, bool with_parameters, CancellationToken& token);
  Tensors run_segment_backward(const SegmentCall& call, Tensors tangents, bool with_parameters);

  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<const Transport> transport_;
  std::unique_ptr<RemoteStages> remote_;  // of the current run; null if all stages are in this process
  std::vector<Stream> caller_streams_;
  size_t num_parameters_;
  std::shared_ptr<const void> memory_owner_;  // keeps alive the graph memory that holds its tensors
  std::vector<StageState> stages_;
  std::vector<Skips> skips_;                   // by micro-batch
  std::optional<OutputMemory> output_memory_;  // from the last stage's first forward to join()
  Phase phase_ = Phase::idle;
  bool can_run_backward_ = false;
  bool gradients_on_callers_ = false;  // parameter gradients were made on the callers' streams
  std::atomic<bool> used_no_fallback_ = true;
  std::optional<ThreadState> thread_state_;
  std::shared_ptr<const DeviceClock> clock_;
  std::vector<StreamEvent> begins_;  // by stage: when its latest action began, if there is a clock
};

}  // namespace gpipe_fast
