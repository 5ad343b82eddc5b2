// A pipeline: one engine, and mini-batches through it from the module's input to its output and back.
#pragma once

#include "engine/disturbance.h"
#include "engine/engine.h"
#include "pipeline/microbatches.h"
#include "pipeline/minibatch.h"
#include "pipeline/replay.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace gpipe_fast {

// Lengths along the dimension of the batch: of each output, of each micro-batch.

// Thread safe: programs and their memory serve one run at a time, so the runs of several threads take turns.
class Pipeline : public std::enable_shared_from_this<Pipeline> {
 public:
  // `poll` is called by the thread that waits for a run, about every 20 ms; what it throws ends the run.
  Pipeline(int32_t num_stages, std::function<void()> poll, Choice transport);

  // One mini-batch: cuts the inputs along the dimensions of their batch, runs the stages, joins the outputs, and ties them into
  // the autograd graph where a gradient can be needed. `parameters` and `buffers` are the whole module's.
  // `key` draws its key, when something random is met first; whenever it is asked, it answers the same.
  Boundary forward(const std::shared_ptr<const Plan>& plan, const Tensors& inputs, const Tensors& parameters,
                   const Tensors& buffers, const std::function<int64_t()>& key);

  struct Gradients {
    Tensors inputs;      // undefined where none is due; so below
    Tensors parameters;  // of the whole module
  };
  // Of one mini-batch, given the gradients of its outputs, which may be undefined.
  Gradients backward(MiniBatch& minibatch, const Tensors& gradients, const Sizes& sizes, bool retain);

  // For the interpreter's exit: ends the run that is under way, and refuses every later one of this thread. Other threads
  // that come here are held until the process ends, as the interpreter does with those that ask for the GIL.
  void close();

  // In the child of a fork: forgets what other threads of the parent were doing.
  void after_fork();

  // See Engine. They wait for their turn.
  void record(int64_t events_per_stage);
  int64_t recorded();
  std::vector<std::vector<Event>> events();
  // From now on, for tests.
  void disturb(Disturbance disturbance);

  // Whether runs on GPUs are captured as graphs, from now on; and what is known of those there are.
  void set_capture(bool capture);
  // Of plans that do not come again.
  void forget_replays();
  std::vector<ReplayReport> replays();

 private:
  class Turn;
  struct Closed {};  // ends what a thread was doing when the pipeline was closed

  template <class Body>
  static auto held_at_exit(const Body& body);
  Boundary forward_once(const std::shared_ptr<const Plan>& plan, const Tensors& inputs,
                        const Tensors& parameters, const Tensors& buffers,
                        const std::function<int64_t()>& key);
  Gradients backward_once(MiniBatch& minibatch, const Tensors& gradients, const Sizes& sizes, bool retain);
  void check_open() const;
  void set_up(const Plan& plan);
  // Of outputs by micro-batch.
  std::vector<Boundary> run_forward(const std::shared_ptr<MiniBatch>& minibatch, const Tensors& inputs,
                                    const Replays::Make& another);
  bool replays_are_due() const;
  template <class Body>
  void with_memory(const Plan& plan, MiniBatch& minibatch, const Body& body);
  // As it is.
  void run(const Actions& actions, MiniBatch& minibatch);

  std::timed_mutex turn_;
  std::atomic<std::thread::id> running_in_{};
  Engine engine_;
  const Choice choice_;
  std::once_flag is_set_up_;
  std::shared_ptr<const Transport> transport_;
  std::unique_ptr<Replays> replays_;  // none on the CPU
  bool capture_ = true;
  std::function<void()> poll_;
  Disturbance disturbance_;
  std::optional<std::thread::id> closed_by_;
};

}  // namespace gpipe_fast
