#include "pipeline/pipeline.h"

#include "check.h"
#include "pipeline/autograd.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace gpipe_fast {
namespace {

// Rethrows the error, and adds the action and, if a program reported it, the layer to its message; layers in Python
// add a note with the same text (gpipe_fast/runtime/eager.py). Uses the c10::Error subclass of the same kind, if
// there is one, because PyTorch's autograd turns every other type into a RuntimeError.
[[noreturn]] void raise(const Failure& failure, const MiniBatch& minibatch) {
  const Action& action = failure.action;
  std::string where = "in action " + action.name();
  if (!failure.place.empty()) {
    where += ": stage " + std::to_string(action.stage) + ", " + failure.place + ", micro-batch " +
             std::to_string(action.microbatch);
  }
  auto with = [&](const std::exception& error) { return std::string(error.what()) + " (" + where + ")"; };
  try {
    std::rethrow_exception(failure.error);
  } catch (c10::OutOfMemoryError& error) {
    error.add_context(where + "; " + minibatch.memory_of(action.stage));
    throw;
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
  std::abort();  // unreachable: exceptions without a message were rethrown unchanged
}

// Scope guard: makes streams the calling thread's current streams.
class On {
 public:
  explicit On(const std::vector<Stream>& streams) {
    for (const Stream& stream : streams) current_.push_back(std::make_unique<Stream::Current>(stream));
  }
  ~On() {
    while (!current_.empty()) current_.pop_back();
  }
  On(const On&) = delete;
  On& operator=(const On&) = delete;

 private:
  std::vector<std::unique_ptr<Stream::Current>> current_;
};

// Scope guard: runs a backward on the streams of the forward's caller. An autograd thread takes over only the
// caller's stream on the outputs' device, and is ordered after no other stream. So the forward's streams first wait
// for the thread's. At the end the thread's streams wait for the forward's, and the outputs' stream waits for all
// of them.
class OfForward {
 public:
  OfForward(std::vector<Stream> own, const std::vector<Stream>& forward)
      : own_(std::move(own)), forward_(forward) {
    for (size_t i = 0; i < own_.size(); ++i) follow(forward_[i], own_[i]);
    on_.emplace(forward_);
  }
  ~OfForward() {
    for (size_t i = 0; i < own_.size(); ++i) {
      follow(own_[i], forward_[i]);
      if (i + 1 < own_.size()) follow(own_.back(), forward_[i]);
    }
  }
  OfForward(const OfForward&) = delete;
  OfForward& operator=(const OfForward&) = delete;

 private:
  static void follow(const Stream& later, const Stream& stream) {
    if (!(later == stream)) later.wait(Moment(stream));
  }

  const std::vector<Stream> own_;  // by stage, as is `forward_`
  const std::vector<Stream>& forward_;
  std::optional<On> on_;
};

struct AbandonOnError {
  ~AbandonOnError() {
    if (!done) minibatch.abandon();
  }
  MiniBatch& minibatch;
  bool done = false;
};

}  // namespace

// A lock on the engine for one thread. Waiting for it polls, so it can be interrupted. Throws if a signal handler
// starts a run while its own thread waits for one.
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

Pipeline::Pipeline(int32_t num_stages, std::function<void()> poll, Choice transport)
    : engine_(num_stages), choice_(transport), poll_(std::move(poll)) {}

template <class Body>
auto Pipeline::held_at_exit(const Body& body) {
  try {
    return body();
  } catch (const Closed&) {
  } catch (const Stopped&) {  // closed during a capture
  }
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

Boundary Pipeline::forward(const std::shared_ptr<const Plan>& plan, const Tensors& inputs,
                           const Tensors& parameters, const Tensors& buffers,
                           const std::function<int64_t()>& key) {
  return held_at_exit([&] { return forward_once(plan, inputs, parameters, buffers, key); });
}

Pipeline::Gradients Pipeline::backward(MiniBatch& minibatch, const Tensors& gradients, const Sizes& sizes,
                                       bool retain) {
  return held_at_exit([&] { return backward_once(minibatch, gradients, sizes, retain); });
}

// Runs `body`; if memory runs out, frees the graphs and runs it once more. Plans with layers in Python are not
// repeated, because the layers may behave differently the second time.
template <class Body>
void Pipeline::with_memory(const Plan& plan, MiniBatch& minibatch, const Body& body) {
  try {
    return body();
  } catch (const c10::OutOfMemoryError&) {
    if (!replays_ || !plan.is_lowered() || !replays_->let_go()) throw;
  }
  minibatch.abandon();
  body();
}

Boundary Pipeline::forward_once(const std::shared_ptr<const Plan>& plan, const Tensors& inputs,
                                const Tensors& parameters, const Tensors& buffers,
                                const std::function<int64_t()>& key) {
  set_up(*plan);
  const auto make = [&] { return std::make_shared<MiniBatch>(plan, transport_, parameters, buffers, key); };
  std::shared_ptr<MiniBatch> minibatch = make();
  Boundary outputs;
  Sizes sizes;
  {
    const Turn turn(*this);
    check_open();
    AbandonOnError guard{*minibatch};
    std::vector<Boundary> parts;
    with_memory(*plan, *minibatch, [&] {
      parts = run_forward(minibatch, inputs, make);
      // Checked before the buffers are written, because it may throw.
      if (plan->check_outputs) plan->check_outputs(parts);
      outputs = join(parts, plan->join_along);
    });
    minibatch->end_forward();
    guard.done = true;
    if (replays_) replays_->after_use(minibatch->callers());
    sizes = sizes_of(parts, plan->join_along);
  }
  tie(outputs, inputs, parameters, shared_from_this(), std::move(minibatch), std::move(sizes));
  return outputs;
}

std::vector<Boundary> Pipeline::run_forward(const std::shared_ptr<MiniBatch>& minibatch,
                                            const Tensors& inputs, const Replays::Make& another) {
  const std::shared_ptr<const Plan>& plan = minibatch->plan();
  const int64_t num_parts = plan->num_microbatches();
  const std::vector<Stream>& callers = minibatch->callers();
  const RunOf of{*minibatch, inputs, 0, [&](const Tensors& tensors) {
                   return cut(tensors, num_parts, [&](size_t i) {
                     const std::optional<int64_t>& dim = plan->cut_along[i];
                     return dim ? tensors[i].chunk(num_parts, *dim) : Tensors(num_parts, tensors[i]);
                   });
                 }};
  const bool captured = replays_are_due() && replays_->has_forward(*plan);
  minibatch->begin_forward(captured ? std::vector<Tensors>(num_parts) : of.cut(inputs));
  if (replays_are_due()) {
    if (const auto* parts = replays_->forward(minibatch, of, another)) return *parts;
    if (captured) minibatch->begin_forward(of.cut(inputs));  // not replayed after all
  }
  run(*plan->forward, *minibatch);
  if (replays_) replays_->after_forward(plan);
  std::vector<Boundary> parts = minibatch->take_outputs();
  for (const Boundary& part : parts) {
    for (const at::Tensor& tensor : part.tensors) transport_->hand_over(tensor, callers);
  }
  return parts;
}

Pipeline::Gradients Pipeline::backward_once(MiniBatch& minibatch, const Tensors& gradients,
                                            const Sizes& sizes, bool retain) {
  const OfForward streams(transport_->callers(), minibatch.callers());
  const Plan& plan = *minibatch.plan();
  const std::vector<Stream>& callers = minibatch.callers();
  const RunOf of{minibatch, gradients, plan.stages.size() - 1,
                 [&](const Tensors& tensors) {
                   return cut_gradients(tensors, sizes, plan.num_microbatches(), plan.join_along);
                 },
                 retain};
  Gradients joined;
  {
    const Turn turn(*this);
    check_open();
    // The forward's tensors are kept for a second attempt if there are graphs to free.
    const bool repeats = replays_ && plan.is_lowered() && replays_->can_let_go();
    AbandonOnError guard{minibatch, /*done=*/true};
    with_memory(plan, minibatch, [&] {
      const bool captured = replays_are_due() && replays_->has_backward(of);
      minibatch.begin_backward(captured ? std::vector<Tensors>(plan.num_microbatches()) : of.cut(gradients),
                               retain || repeats);
      guard.done = false;
      if (!replays_are_due() || !replays_->backward(of)) {
        if (captured) minibatch.begin_backward(of.cut(gradients), retain || repeats);  // not replayed
        run(*plan.backward, minibatch);
        if (replays_) replays_->after_backward(of);
      }
      MiniBatch::Gradients found = minibatch.end_backward(callers);
      for (const Tensors& tensors : found.inputs) {
        for (const at::Tensor& tensor : tensors) transport_->hand_over(tensor, callers);
      }
      for (const at::Tensor& tensor : found.parameters) transport_->hand_over(tensor, callers);
      joined = {join_gradients(found.inputs, plan.cut_along), std::move(found.parameters)};
    });
    if (!retain) minibatch.release();
    guard.done = true;
    if (replays_) replays_->after_use(callers);
  }
  return joined;
}

void Pipeline::set_up(const Plan& plan) {
  std::call_once(is_set_up_, [&] {
    std::vector<at::Device> devices;
    for (const StagePlan& stage : plan.stages) devices.push_back(stage.device);
    transport_ = std::make_shared<Transport>(devices, choice_);
    if (transport_->is_cpu()) return;
    replays_ = std::make_unique<Replays>(transport_, [this](const Actions& actions, MiniBatch& minibatch) {
      if (auto failure = engine_.run(actions, minibatch)) std::rethrow_exception(failure->error);
    });
  });
}

// Runs with injected faults, and recorded runs, are uncaptured.
bool Pipeline::replays_are_due() const {
  return replays_ && capture_ && disturbance_.longest_delay_us == 0 && disturbance_.faults.empty() &&
         engine_.recorded() == 0;
}

void Pipeline::run(const Actions& actions, MiniBatch& minibatch) {
  const std::vector<Stream>& callers = minibatch.callers();
  if (replays_) replays_->before_run();
  transport_->enter(callers);
  struct Leave {
    ~Leave() { transport.leave(callers, failed); }
    const Transport& transport;
    const std::vector<Stream>& callers;
    bool failed = true;
  } leave{*transport_, callers};
  if (&actions == minibatch.plan()->forward.get()) {
    minibatch.draw();
    minibatch.replicate();
  }
  Disturbed disturbed(minibatch, disturbance_);
  const bool plain = disturbance_.longest_delay_us == 0 && disturbance_.faults.empty();
  Work& work = plain ? static_cast<Work&>(minibatch) : disturbed;
  try {
    if (auto failure = engine_.run(actions, work, poll_)) raise(*failure, minibatch);
  } catch (const Stopped&) {
    throw Closed();
  }
  leave.failed = false;
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
  new (&turn_) std::timed_mutex;  // a thread of the parent may have held it
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

void Pipeline::set_capture(bool capture) {
  const Turn turn(*this);
  capture_ = capture;
  if (!capture && replays_) replays_->forget();
}

void Pipeline::forget_replays() {
  const Turn turn(*this);
  if (replays_) replays_->forget();
}

std::vector<ReplayReport> Pipeline::replays() {
  const Turn turn(*this);
  return replays_ ? replays_->reports() : std::vector<ReplayReport>{};
}

void Pipeline::disturb(Disturbance disturbance) {
  const Turn turn(*this);
  disturbance_ = std::move(disturbance);
}

}  // namespace gpipe_fast
