// A pipeline: runs the forward and backward of mini-batches through one engine.
#pragma once

#include "engine/engine.h"
#include "engine/fault_injection.h"
#include "engine/waiter.h"
#include "pipeline/graph_cache.h"
#include "pipeline/microbatches.h"
#include "pipeline/minibatch.h"
#include "pipeline/peers.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace gpipe_fast {

// Thread safe. Programs and their memory serve one run at a time, so a lock serializes the runs of several threads. An
// inference stream gives the lock up when another thread waits for it.
class Pipeline : public std::enable_shared_from_this<Pipeline> {
 public:
  // The thread that waits for a run calls `poll` about every 20 ms. An exception from `poll` ends the run.
  Pipeline(int32_t num_stages, std::function<void()> poll, TransportChoice transport);

  // Runs the forward of one mini-batch: splits the inputs along their batch dimensions, runs the stages,
  // concatenates the outputs, and connects them to the autograd graph if they can need gradients. `parameters` and
  // `buffers` belong to the whole module. `key` draws the mini-batch's random key on its first call, when a random
  // operator needs it; later calls return the same key.
  Boundary forward(const std::shared_ptr<const Plan>& plan, const Tensors& inputs, const Tensors& parameters,
                   const Tensors& buffers, const std::function<int64_t()>& key);

  struct Gradients {
    Tensors inputs;      // undefined where no gradient is due
    Tensors parameters;  // the whole module's, as above
  };
  // Runs the backward of one mini-batch. `gradients` belong to its outputs and may be undefined. `sizes`: the
  // outputs' lengths by micro-batch. `retain`: another backward may follow.
  Gradients backward(MiniBatch& minibatch, const Tensors& gradients, const PartLengths& sizes, bool retain);

  // Runs forward and backward of one mini-batch in one run, in the order of the plan's step. `given`: the tensors of
  // the plan's given skips, on the last stage's device. `gradients`: those of the first output, the loss, by
  // micro-batch: one for each dtype that it may have. The outputs are connected to the autograd graph; its backward only
  // returns the gradients, whatever it gets. If the run fails, nothing has changed.
  //
  // `offer`: called with the outputs when the run has succeeded here, before it is known whether it has in the other
  // processes; may be empty.
  using Offer = std::function<void(const Tensors& outputs)>;
  Boundary step(const std::shared_ptr<const Plan>& plan, const Tensors& inputs, const Tensors& given,
                const std::vector<Tensors>& gradients, const Tensors& parameters, const Tensors& buffers,
                const std::function<int64_t()>& key, const Offer& offer);

  // Call when the interpreter exits: cancels the current run, and makes later runs of this thread throw. Other threads
  // that use the pipeline block until the process ends, like threads that request the GIL of an exiting interpreter.
  void close();

  // Call in the child of a fork: discards the runs of the parent's other threads.
  void after_fork();

  // See Engine. Each call waits until no run is in progress.
  void record(int64_t events_per_stage);
  int64_t recorded();
  std::vector<std::vector<Event>> events();
  // Sets the delays and failures that later runs inject, for tests.
  void inject_faults(FaultInjection fault_injection);

  // Sets how later runs exchange tensors and outcomes with the processes of other stages; null if there are none.
  void set_peers(std::shared_ptr<Channels> channels, std::shared_ptr<Peers> peers);

  // Sets when later runs on GPUs are captured as graphs. `never` also frees all graphs.
  void set_capture(Capture capture);
  // Frees all graphs. Call when their plans will not be used again.
  void forget_graphs();
  // Returns one report for each plan in the graph cache; empty on the CPU.
  std::vector<GraphReport> graph_reports();

 private:
  friend class InferenceStream;

  // A lock on the engine for one thread. Waiting for it polls, so it can be interrupted. Throws if a signal handler
  // starts a run while its own thread waits for one.
  class EngineLock {
   public:
    EngineLock(Pipeline& pipeline, const std::function<void()>& poll);
    explicit EngineLock(Pipeline& pipeline) : EngineLock(pipeline, pipeline.poll_) {}
    ~EngineLock();
    EngineLock(const EngineLock&) = delete;
    EngineLock& operator=(const EngineLock&) = delete;

   private:
    Pipeline& pipeline_;
  };
  struct Closed {};  // unwinds a thread whose pipeline was closed

  template <class Body>
  static auto block_if_closed(const Body& body);
  Boundary run_forward_step(const std::shared_ptr<const Plan>& plan, const Tensors& inputs,
                            const Tensors& parameters, const Tensors& buffers,
                            const std::function<int64_t()>& key);
  Gradients run_backward_step(MiniBatch& minibatch, const Tensors& gradients, const PartLengths& sizes,
                              bool retain);
  Boundary run_step(const std::shared_ptr<const Plan>& plan, const Tensors& inputs, const Tensors& given,
                    const std::vector<Tensors>& gradients, const Tensors& parameters, const Tensors& buffers,
                    const std::function<int64_t()>& key, const Offer& offer);
  // Rethrows the error of an action, with a message that names the action.
  [[noreturn]] static void raise(const Failure& failure, const MiniBatch& minibatch);
  void check_open() const;
  void create_transport(const Plan& plan);
  // Returns the outputs by micro-batch. May capture a second mini-batch of the plan first.
  std::vector<Boundary> run_forward(const std::shared_ptr<MiniBatch>& minibatch, const Tensors& inputs,
                                    const GraphCache::MakeMiniBatch& make_other);
  bool may_use_graphs() const;
  // Times an uncaptured run by the stream of a stage, if the graph cache compares such times.
  std::optional<RunTimer> start_timer(size_t stage) const;
  template <class Body>
  void retry_without_graphs(const Plan& plan, MiniBatch& minibatch, const Body& body);
  // Returns the outputs by micro-batch, handed over to the callers' streams.
  std::vector<Boundary> take_outputs(MiniBatch& minibatch) const;
  // Hands the gradients over to the callers' streams, and combines those of the inputs.
  Gradients combined(MiniBatch::Gradients found, const Plan& plan,
                     const std::vector<Stream>& caller_streams) const;
  // Runs the actions uncaptured. `finish` is the end of the run: if it throws, the run has failed.
  void run(const Actions& actions, MiniBatch& minibatch, const std::function<void()>& finish = {});
  void run_actions(const Actions& actions, MiniBatch& minibatch);
  void poll_all();
  // Waits, while it polls, for the work of the stages of this process, for which the caller's streams wait.
  void await_stages();
  struct Joined {
    Boundary outputs;
    PartLengths sizes;
  };
  // Concatenates the outputs of micro-batches, or makes what stands for them if they are in another process.
  Joined join(const std::vector<Boundary>& parts, MiniBatch& minibatch) const;

  std::timed_mutex mutex_;
  std::atomic<std::thread::id> running_thread_{};
  std::atomic<int> num_waiting_{0};  // threads that wait for the lock
  Waiter stream_changed_;  // where an inference stream and its caller wait for each other, and for the above
  Engine engine_;
  const TransportChoice transport_choice_;
  std::once_flag transport_created_;
  std::shared_ptr<const Transport> transport_;
  std::unique_ptr<GraphCache> graph_cache_;        // null on the CPU
  std::shared_ptr<const DeviceClock> clock_;       // of recorded runs; null on the CPU
  std::shared_ptr<const Actions> stream_actions_;  // of an inference stream's runs; null before the first
  Capture capture_ = Capture::where_it_pays;
  std::function<void()> poll_;
  FaultInjection fault_injection_;
  std::shared_ptr<Channels> channels_;
  std::shared_ptr<Peers> peers_;
  std::optional<std::thread::id> closed_by_;
};

template <class Body>
auto Pipeline::block_if_closed(const Body& body) {
  try {
    return body();
  } catch (const Closed&) {
  } catch (const Cancelled&) {  // closed during a capture
  }
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}
}  // namespace gpipe_fast
