#include "pipeline.h"

#include "autograd.h"
#include "check.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace gpipe_fast {
namespace {

// The error as it was, naming the action. As c10::Error where there is one of the kind, since PyTorch's autograd makes a
// RuntimeError of every other type.
[[noreturn]] void raise(const Failure& failure) {
  const std::string where = "in action " + failure.action.name();
  auto with = [&](const std::exception& error) { return std::string(error.what()) + " (" + where + ")"; };
  try {
    std::rethrow_exception(failure.error);
  } catch (c10::Error& error) {
    error.add_context(where);
    throw;
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, with(error));
  } catch (const std::out_of_range& error) {
    TORCH_CHECK_INDEX(false, with(error));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(with(error));
  }
  std::abort();  // unreachable: what has no place for a message comes out as it is
}

// All below autograd: a mini-batch is one node of the graph.
Tensors cut(const at::Tensor& tensor, int64_t num_parts) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return tensor.chunk(num_parts);
}
Tensors cut(const at::Tensor& tensor, const std::vector<int64_t>& sizes) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return tensor.split_with_sizes(sizes);
}
at::Tensor join(const Tensors& parts) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::cat(parts);
}

}  // namespace

// One thread's turn at the engine. It may be interrupted while it waits. A signal handler that runs while its own thread
// waits for a run must not ask for another.
class Pipeline::Turn {
 public:
  explicit Turn(Pipeline& pipeline) : pipeline_(pipeline) {
    GPIPE_CHECK(pipeline.running_in_.load() != std::this_thread::get_id(),
                "a pipeline was called from within its own run, by a signal handler");
    while (!pipeline.turn_.try_lock_for(kPollInterval)) pipeline.poll_();
    pipeline.running_in_.store(std::this_thread::get_id());
  }
  ~Turn() {
    pipeline_.running_in_.store(std::thread::id());
    pipeline_.turn_.unlock();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Pipeline& pipeline_;
};

Pipeline::Pipeline(int32_t num_stages, std::function<void()> poll)
    : engine_(num_stages), poll_(std::move(poll)) {}

template <class Body>
auto Pipeline::held_at_exit(const Body& body) {
  try {
    return body();
  } catch (const Closed&) {
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

at::Tensor Pipeline::forward(const std::shared_ptr<const Plan>& plan, const at::Tensor& input,
                             const Tensors& parameters, const Tensors& buffers, int64_t key) {
  return held_at_exit([&] { return forward_once(plan, input, parameters, buffers, key); });
}

Pipeline::Gradients Pipeline::backward(MiniBatch& minibatch, const at::Tensor& gradient,
                                       const std::vector<int64_t>& sizes, bool retain) {
  return held_at_exit([&] { return backward_once(minibatch, gradient, sizes, retain); });
}

at::Tensor Pipeline::forward_once(const std::shared_ptr<const Plan>& plan, const at::Tensor& input,
                                  const Tensors& parameters, const Tensors& buffers, int64_t key) {
  auto minibatch = std::make_shared<MiniBatch>(plan, parameters, buffers, key);
  std::vector<Tensors> microbatches;
  for (at::Tensor& part : cut(input, plan->num_microbatches())) microbatches.push_back({std::move(part)});
  Tensors outputs;
  at::Tensor output;
  {
    const Turn turn(*this);
    minibatch->begin_forward(std::move(microbatches));
    run(plan->forward, *minibatch);
    for (Tensors& part : minibatch->take_outputs()) outputs.push_back(std::move(part.at(0)));
    // First, as it may fail; then nothing can.
    output = join(outputs);
    minibatch->end_forward();
  }
  if (plan->differentiable) {
    std::vector<int64_t> sizes;
    for (const at::Tensor& part : outputs) sizes.push_back(part.size(0));
    tie(output, input, parameters, shared_from_this(), std::move(minibatch), std::move(sizes));
  }
  return output;
}

Pipeline::Gradients Pipeline::backward_once(MiniBatch& minibatch, const at::Tensor& gradient,
                                            const std::vector<int64_t>& sizes, bool retain) {
  std::vector<Tensors> microbatches;
  for (at::Tensor& part : cut(gradient, sizes)) microbatches.push_back({std::move(part)});
  MiniBatch::Gradients gradients;
  {
    const Turn turn(*this);
    minibatch.begin_backward(std::move(microbatches), retain);
    run(*minibatch.plan().backward, minibatch);
    gradients = minibatch.end_backward();
  }
  Tensors inputs;
  for (Tensors& part : gradients.inputs) {
    if (!part.empty() && part[0].defined()) inputs.push_back(std::move(part[0]));
  }
  return {inputs.empty() ? at::Tensor() : join(inputs), std::move(gradients.parameters)};
}

void Pipeline::run(const Actions& actions, MiniBatch& minibatch) {
  struct AbandonOnError {
    ~AbandonOnError() {
      if (!done) minibatch.abandon();
    }
    MiniBatch& minibatch;
    bool done = false;
  } guard{minibatch};
  check_open();
  Disturbed disturbed(minibatch, disturbance_);
  const bool plain = disturbance_.longest_delay_us == 0 && disturbance_.faults.empty();
  Work& work = plain ? static_cast<Work&>(minibatch) : disturbed;
  try {
    if (auto failure = engine_.run(actions, work, poll_)) raise(*failure);
  } catch (const Stopped&) {
    throw Closed();
  }
  guard.done = true;
}

void Pipeline::close() {
  engine_.interrupt();
  const Turn turn(*this);
  closed_by_ = std::this_thread::get_id();
}

void Pipeline::check_open() const {
  if (!closed_by_) return;
  GPIPE_CHECK(closed_by_ != std::this_thread::get_id(), "a pipeline cannot run while the interpreter exits");
  throw Closed();
}

void Pipeline::after_fork() {
  new (&turn_) std::timed_mutex;  // a thread that is no more may have held it
  running_in_.store(std::thread::id());
  engine_.after_fork();
}

void Pipeline::record(int64_t events_per_stage) {
  const Turn turn(*this);
  engine_.record(events_per_stage);
}

int64_t Pipeline::recorded() {
  const Turn turn(*this);
  return engine_.recorded();
}

std::vector<std::vector<Event>> Pipeline::events() {
  const Turn turn(*this);
  return engine_.events();
}

void Pipeline::disturb(Disturbance disturbance) {
  const Turn turn(*this);
  disturbance_ = std::move(disturbance);
}

}  // namespace gpipe_fast
