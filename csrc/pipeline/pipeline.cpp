#include "pipeline/pipeline.h"

#include "check.h"
#include "device/failure.h"
#include "pipeline/autograd.h"

#include <ATen/ops/zeros.h>
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

// How often a thread that waits for a device asks whether it is done.
constexpr auto kQueryInterval = std::chrono::microseconds(20);

// Scope guard: makes streams the calling thread's current streams.
class CurrentStreams {
 public:
  explicit CurrentStreams(const std::vector<Stream>& streams) {
    for (const Stream& stream : streams) current_.push_back(std::make_unique<Stream::Guard>(stream));
  }
  ~CurrentStreams() {
    while (!current_.empty()) current_.pop_back();
  }
  CurrentStreams(const CurrentStreams&) = delete;
  CurrentStreams& operator=(const CurrentStreams&) = delete;

 private:
  std::vector<std::unique_ptr<Stream::Guard>> current_;
};

// Scope guard: calls `end` at the end of a scope. succeed() passes on its errors; the destructor, which runs while an
// exception is under way, ignores them.
template <class End>
class AtEnd {
 public:
  explicit AtEnd(End end) : end_(std::move(end)) {}
  ~AtEnd() {
    if (ended_) return;
    try {
      end_(/*failed=*/true);
    } catch (const std::exception&) {
      // The device has failed, so no work runs there any more.
    }
  }
  AtEnd(const AtEnd&) = delete;
  AtEnd& operator=(const AtEnd&) = delete;

  void succeed() {
    ended_ = true;
    end_(/*failed=*/false);
  }

 private:
  const End end_;
  bool ended_ = false;
};

// Runs a backward on the streams of the forward's caller. An autograd thread takes over only the caller's stream on the
// outputs' device, and is ordered after no other stream. So the forward's streams first wait for the thread's. Call
// end() at the end: the thread's streams wait for the forward's, and the outputs' stream waits for all of them.
class BackwardStreams {
 public:
  BackwardStreams(std::vector<Stream> own, const std::vector<Stream>& forward)
      : own_(std::move(own)), forward_(forward) {
    for (size_t i = 0; i < own_.size(); ++i) follow(forward_[i], own_[i]);
    current_.emplace(forward_);
  }
  BackwardStreams(const BackwardStreams&) = delete;
  BackwardStreams& operator=(const BackwardStreams&) = delete;

  void end() const {
    for (size_t i = 0; i < own_.size(); ++i) {
      follow(own_[i], forward_[i]);
      if (i + 1 < own_.size()) follow(own_.back(), forward_[i]);
    }
  }

 private:
  static void follow(const Stream& later, const Stream& stream) {
    if (!(later == stream)) later.wait(StreamEvent(stream));
  }

  const std::vector<Stream> own_;  // by stage, as is `forward_`
  const std::vector<Stream>& forward_;
  std::optional<CurrentStreams> current_;
};

struct AbandonOnError {
  ~AbandonOnError() {
    if (done) return;
    transport.survive_failures();
    minibatch.abandon();
  }
  const Transport& transport;
  MiniBatch& minibatch;
  bool done = false;
};

// Returns the action that has failed and, if a program reported it, the layer.
std::string place_of(const Failure& failure) {
  const Action& action = failure.action;
  const std::string where = "in action " + action.name();
  if (failure.layer_title.empty()) return where;
  return where + ": stage " + std::to_string(action.stage) + ", " + failure.layer_title + ", micro-batch " +
         std::to_string(action.microbatch);
}

// Rethrows the error of an action that was being captured. The message begins with the place, because the graph cache
// keeps its first line, except for errors that the graph cache tells apart by type.
[[noreturn]] void raise_in_capture(const Failure& failure) {
  try {
    std::rethrow_exception(failure.error);
  } catch (const Cancelled&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error(place_of(failure) + ": " + error.what());
  }
}

}  // namespace

Pipeline::EngineLock::EngineLock(Pipeline& pipeline, const std::function<void()>& poll)
    : pipeline_(pipeline) {
  GPIPE_CHECK(pipeline.running_thread_.load() != std::this_thread::get_id(),
              "a pipeline was called from within its own run, by a signal handler");
  if (!pipeline.mutex_.try_lock()) {
    struct Waiting {
      explicit Waiting(Pipeline& pipeline) : pipeline(pipeline) { add(1); }
      ~Waiting() { add(-1); }
      void add(int difference) const {
        pipeline.num_waiting_.fetch_add(difference, std::memory_order_seq_cst);
        pipeline.stream_changed_.wake();
      }
      Pipeline& pipeline;
    } waiting(pipeline);
    while (!pipeline.mutex_.try_lock_for(kPollInterval)) poll();
  }
  pipeline.running_thread_.store(std::this_thread::get_id());
}

Pipeline::EngineLock::~EngineLock() {
  pipeline_.running_thread_.store(std::thread::id());
  pipeline_.mutex_.unlock();
}

Pipeline::Pipeline(int32_t num_stages, std::function<void()> poll, TransportChoice transport)
    : engine_(num_stages), transport_choice_(transport), poll_(std::move(poll)) {}

// Rethrows the error, and adds the action and, if a program reported it, the layer to its message; layers in Python
// add a note with the same text (gpipe_fast/runtime/python_layers.py). Uses the c10::Error subclass of the same kind,
// if there is one, because PyTorch's autograd turns every other type into a RuntimeError. PyTorch's CPU allocator
// throws a plain c10::Error; only its message shows that memory ran out.
void Pipeline::raise(const Failure& failure, const MiniBatch& minibatch) {
  const Action& action = failure.action;
  const std::string where = place_of(failure);
  auto with = [&](const std::exception& error) { return std::string(error.what()) + " (" + where + ")"; };
  try {
    std::rethrow_exception(failure.error);
  } catch (c10::OutOfMemoryError& error) {
    error.add_context(where + "; " + minibatch.describe_memory(action.stage));
    throw;
  } catch (c10::Error& error) {
    const bool out_of_memory = error.msg().find("DefaultCPUAllocator") != std::string::npos;
    error.add_context(out_of_memory ? where + "; " + minibatch.describe_memory(action.stage) : where);
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

Boundary Pipeline::forward(const std::shared_ptr<const Plan>& plan, const Tensors& inputs,
                           const Tensors& parameters, const Tensors& buffers,
                           const std::function<int64_t()>& key) {
  return block_if_closed([&] { return run_forward_step(plan, inputs, parameters, buffers, key); });
}

Pipeline::Gradients Pipeline::backward(MiniBatch& minibatch, const Tensors& gradients,
                                       const PartLengths& sizes, bool retain) {
  return block_if_closed([&] { return run_backward_step(minibatch, gradients, sizes, retain); });
}

Boundary Pipeline::step(const std::shared_ptr<const Plan>& plan, const Tensors& inputs, const Tensors& given,
                        const std::vector<Tensors>& gradients, const Tensors& parameters,
                        const Tensors& buffers, const std::function<int64_t()>& key, const Offer& offer) {
  return block_if_closed(
      [&] { return run_step(plan, inputs, given, gradients, parameters, buffers, key, offer); });
}

// Runs `body`; if memory runs out, frees the graphs and runs it once more. Plans with layers in Python are not
// repeated, because the layers may behave differently the second time.
template <class Body>
void Pipeline::retry_without_graphs(const Plan& plan, MiniBatch& minibatch, const Body& body) {
  try {
    return body();
  } catch (const c10::OutOfMemoryError&) {
    if (!graph_cache_ || !plan.is_lowered() || !graph_cache_->free_graphs()) throw;
  }
  minibatch.abandon();
  body();
}

Boundary Pipeline::run_forward_step(const std::shared_ptr<const Plan>& plan, const Tensors& inputs,
                                    const Tensors& parameters, const Tensors& buffers,
                                    const std::function<int64_t()>& key) {
  create_transport(*plan);
  const auto make = [&] { return std::make_shared<MiniBatch>(plan, transport_, parameters, buffers, key); };
  std::shared_ptr<MiniBatch> minibatch = make();
  Joined joined;
  {
    const EngineLock lock(*this);
    check_open();
    transport_->check_alive();
    std::vector<Boundary> parts;  // freed after the guard has noticed that a device failed
    AbandonOnError guard{*transport_, *minibatch};
    retry_without_graphs(*plan, *minibatch, [&] {
      parts = run_forward(minibatch, inputs, make);
      // Checked before the buffers are written, because it may throw.
      if (plan->check_outputs) plan->check_outputs(parts);
      joined = join(parts, *minibatch);
    });
    minibatch->end_forward();
    guard.done = true;
    if (graph_cache_) graph_cache_->after_use(minibatch->caller_streams());
    for (Boundary& part : parts) free_shared(part.tensors);
  }
  connect_to_graph(joined.outputs, inputs, parameters, shared_from_this(), std::move(minibatch),
                   std::move(joined.sizes));
  return joined.outputs;
}

std::vector<Boundary> Pipeline::run_forward(const std::shared_ptr<MiniBatch>& minibatch,
                                            const Tensors& inputs,
                                            const GraphCache::MakeMiniBatch& make_other) {
  const std::shared_ptr<const Plan>& plan = minibatch->plan();
  const int64_t num_parts = plan->num_microbatches();
  const GraphRun graph_run{*minibatch, inputs, 0, [&](const Tensors& tensors) {
                             return split_along(tensors, plan->split_dims, num_parts);
                           }};
  const bool captured = may_use_graphs() && graph_cache_->has_forward(*plan);
  minibatch->begin_forward(captured ? std::vector<Tensors>(num_parts) : graph_run.split_tensors(inputs));
  if (may_use_graphs()) {
    if (const auto* parts = graph_cache_->forward(minibatch, graph_run, make_other)) return *parts;
    if (captured) minibatch->begin_forward(graph_run.split_tensors(inputs));  // not replayed after all
  }
  const std::optional<RunTimer> timer = start_timer(plan->stages.size() - 1);
  run(*plan->forward, *minibatch);
  if (graph_cache_) graph_cache_->after_forward(plan, timer);
  return take_outputs(*minibatch);
}

std::vector<Boundary> Pipeline::take_outputs(MiniBatch& minibatch) const {
  std::vector<Boundary> parts = minibatch.take_outputs();
  for (const Boundary& part : parts) {
    for (const at::Tensor& tensor : part.tensors) transport_->hand_over(tensor, minibatch.caller_streams());
  }
  return parts;
}

Boundary Pipeline::run_step(const std::shared_ptr<const Plan>& plan, const Tensors& inputs,
                            const Tensors& given, const std::vector<Tensors>& gradients,
                            const Tensors& parameters, const Tensors& buffers,
                            const std::function<int64_t()>& key, const Offer& offer) {
  create_transport(*plan);
  const auto minibatch = std::make_shared<MiniBatch>(plan, transport_, parameters, buffers, key);
  const int64_t num_parts = plan->num_microbatches();
  Joined joined;
  {
    const EngineLock lock(*this);
    check_open();
    transport_->check_alive();
    std::vector<Boundary> parts;  // freed after the guard has noticed that a device failed
    AbandonOnError guard{*transport_, *minibatch};
    minibatch->begin_step(split_along(inputs, plan->split_dims, num_parts),
                          split_along(given, plan->given_dims, num_parts), gradients);
    run(*plan->step, *minibatch, [&] {
      // The caller's thread reads the losses, and could not poll while it waits for a process that has failed.
      if (offer && channels_ && channels_->is_on_device()) await_stages();
      parts = take_outputs(*minibatch);
      // Checked before the buffers are written, because it may throw.
      if (plan->check_outputs) plan->check_outputs(parts);
      joined = join(parts, *minibatch);
      if (offer) offer(joined.outputs.tensors);
    });
    minibatch->end_forward();
    minibatch->step_gradients = minibatch->end_backward(minibatch->caller_streams());
    guard.done = true;
    for (Boundary& part : parts) free_shared(part.tensors);
  }
  connect_to_graph(joined.outputs, inputs, parameters, shared_from_this(), minibatch,
                   std::move(joined.sizes));
  return joined.outputs;
}

Pipeline::Joined Pipeline::join(const std::vector<Boundary>& parts, MiniBatch& minibatch) const {
  const Plan& plan = *minibatch.plan();
  if (!plan.token) return {minibatch.join(parts), lengths_of(parts, plan.cat_dim)};
  return {{{at::zeros({}, at::kFloat)}, plan.token}, PartLengths(1)};
}

Pipeline::Gradients Pipeline::combined(MiniBatch::Gradients found, const Plan& plan,
                                       const std::vector<Stream>& caller_streams) const {
  for (const Tensors& tensors : found.inputs) {
    for (const at::Tensor& tensor : tensors) transport_->hand_over(tensor, caller_streams);
  }
  for (const at::Tensor& tensor : found.parameters) transport_->hand_over(tensor, caller_streams);
  Gradients result{combine_gradients(found.inputs, plan.split_dims), std::move(found.parameters)};
  for (Tensors& tensors : found.inputs) free_shared(tensors);
  return result;
}

Pipeline::Gradients Pipeline::run_backward_step(MiniBatch& minibatch, const Tensors& gradients,
                                                const PartLengths& sizes, bool retain) {
  const BackwardStreams streams(transport_->caller_streams(), minibatch.caller_streams());
  AtEnd end([&](bool) { streams.end(); });
  const Plan& plan = *minibatch.plan();
  const std::vector<Stream>& caller_streams = minibatch.caller_streams();
  const GraphRun graph_run{minibatch, gradients, plan.stages.size() - 1,
                           [&](const Tensors& tensors) {
                             if (plan.token) return std::vector<Tensors>(plan.num_microbatches());
                             return split_gradients(tensors, sizes, plan.num_microbatches(), plan.cat_dim);
                           },
                           retain};
  Gradients result;
  if (minibatch.step_gradients) {
    result = combined(std::move(*minibatch.step_gradients), plan, caller_streams);
    minibatch.step_gradients.reset();
    end.succeed();
    return result;
  }
  {
    const EngineLock lock(*this);
    check_open();
    transport_->check_alive();
    // The forward's tensors are kept for a second attempt if there are graphs to free.
    const bool repeats = graph_cache_ && plan.is_lowered() && graph_cache_->can_free_graphs();
    AbandonOnError guard{*transport_, minibatch, /*done=*/true};
    retry_without_graphs(plan, minibatch, [&] {
      const bool captured = may_use_graphs() && graph_cache_->has_backward(graph_run);
      minibatch.begin_backward(
          captured ? std::vector<Tensors>(plan.num_microbatches()) : graph_run.split_tensors(gradients),
          retain || repeats);
      guard.done = false;
      if (!may_use_graphs() || !graph_cache_->backward(graph_run)) {
        if (captured)
          minibatch.begin_backward(graph_run.split_tensors(gradients), retain || repeats);  // not replayed
        const std::optional<RunTimer> timer = start_timer(0);
        run(*plan.backward, minibatch);
        if (graph_cache_) graph_cache_->after_backward(graph_run, timer);
      }
      result = combined(minibatch.end_backward(caller_streams), plan, caller_streams);
    });
    if (!retain) minibatch.release();
    guard.done = true;
    if (graph_cache_) graph_cache_->after_use(caller_streams);
  }
  end.succeed();
  return result;
}

void Pipeline::create_transport(const Plan& plan) {
  std::call_once(transport_created_, [&] {
    std::vector<at::Device> devices;
    for (const StagePlan& stage : plan.stages) devices.push_back(stage.device);
    transport_ = std::make_shared<Transport>(devices, transport_choice_, peers_ != nullptr);
    if (transport_->is_cpu()) return;
    graph_cache_ = std::make_unique<GraphCache>(transport_, [this](const Actions& actions, Work& work) {
      if (auto failure = engine_.run(actions, work)) raise_in_capture(*failure);
    });
    graph_cache_->set_capture(capture_);
  });
}

std::optional<RunTimer> Pipeline::start_timer(size_t stage) const {
  if (!may_use_graphs() || capture_ != Capture::where_it_pays) return std::nullopt;
  return RunTimer(transport_->work(static_cast<int32_t>(stage)));
}

// Runs with injected faults, and recorded runs, are uncaptured.
bool Pipeline::may_use_graphs() const {
  return graph_cache_ && capture_ != Capture::never && fault_injection_.empty() && engine_.recorded() == 0;
}

void Pipeline::run(const Actions& actions, MiniBatch& minibatch, const std::function<void()>& finish) {
  const auto run_here = [&] {
    run_actions(actions, minibatch);
    if (finish) finish();
  };
  if (!peers_) return run_here();
  GPIPE_CHECK(channels_ != nullptr,
              "a call of the pipeline has failed in some process since the forward of this mini-batch; "
              "call the model again");
  minibatch.begin_exchange(channels_, actions);
  channels_->begin_run();
  try {
    try {
      if (&actions == minibatch.plan()->backward.get()) peers_->begin_backward(minibatch.run_number);
      run_here();
    } catch (const c10::Error& error) {
      // Tells the other processes; throws the error that all agree on if one of them has failed, too. An error that a
      // poll has found also comes here.
      peers_->fail(error.what_without_backtrace());
      throw;
    } catch (const std::exception& error) {
      peers_->fail(error.what());
      throw;
    }
    minibatch.run_number =
        peers_->succeed();  // before anything changes that a failure elsewhere would have to undo
  } catch (...) {
    // The channels may contain tensors that nobody will receive.
    channels_->abandon();
    minibatch.end_exchange();
    channels_.reset();
    throw;
  }
}

void Pipeline::run_actions(const Actions& actions, MiniBatch& minibatch) {
  const std::vector<Stream>& caller_streams = minibatch.caller_streams();
  if (graph_cache_) graph_cache_->before_run();
  transport_->begin_run(caller_streams);
  AtEnd end([&](bool failed) { transport_->end_run(caller_streams, failed); });
  if (&actions != minibatch.plan()->backward.get()) {
    minibatch.make_random_keys();
    minibatch.replicate();
  }
  if (engine_.recorded() > 0 && graph_cache_ && !clock_)
    clock_ = std::make_shared<DeviceClock>(*transport_, engine_.num_stages());
  minibatch.set_clock(clock_);
  FaultInjectingWork faulty(minibatch, fault_injection_);
  Work& work = fault_injection_.empty() ? static_cast<Work&>(minibatch) : faulty;
  try {
    if (auto failure = engine_.run(actions, work, [this] { poll_all(); })) raise(*failure, minibatch);
  } catch (const Cancelled&) {
    throw Closed();
  } catch (...) {
    transport_->survive_failures();
    throw;
  }
  end.succeed();
}

void Pipeline::poll_all() {
  poll_();
  if (peers_) peers_->poll();
}

void Pipeline::await_stages() {
  auto polled = std::chrono::steady_clock::now();
  for (int32_t stage = 0; stage < engine_.num_stages(); ++stage) {
    if (!channels_->has(stage)) continue;
    const StreamEvent done(transport_->work(stage));
    while (!done.is_complete()) {
      std::this_thread::sleep_for(kQueryInterval);
      if (std::chrono::steady_clock::now() - polled < kPollInterval) continue;
      poll_all();
      polled = std::chrono::steady_clock::now();
    }
  }
}

void Pipeline::close() {
  engine_.interrupt();
  const EngineLock lock(*this);
  closed_by_ = std::this_thread::get_id();
}

void Pipeline::check_open() const {
  if (!closed_by_) return;
  GPIPE_CHECK(closed_by_ != std::this_thread::get_id(), "a pipeline cannot run while the interpreter exits");
  throw Closed();
}

void Pipeline::after_fork() {
  new (&mutex_) std::timed_mutex;  // a thread of the parent may have held it
  running_thread_.store(std::thread::id());
  num_waiting_ = 0;
  new (&stream_changed_) Waiter;
  engine_.after_fork();
  // Never freed: the threads of the channels do not exist here.
  if (channels_) (void)new std::shared_ptr<Channels>(std::move(channels_));
}

void Pipeline::record(int64_t events_per_stage) {
  const EngineLock lock(*this);
  engine_.record(events_per_stage);
  clock_ = nullptr;
}

int64_t Pipeline::recorded() {
  const EngineLock lock(*this);
  return engine_.recorded();
}

std::vector<std::vector<Event>> Pipeline::events() {
  const EngineLock lock(*this);
  return engine_.events();
}

void Pipeline::set_peers(std::shared_ptr<Channels> channels, std::shared_ptr<Peers> peers) {
  const EngineLock lock(*this);
  channels_ = std::move(channels);
  peers_ = std::move(peers);
}

void Pipeline::set_capture(Capture capture) {
  const EngineLock lock(*this);
  capture_ = capture;
  if (!graph_cache_) return;
  graph_cache_->set_capture(capture);
  if (capture == Capture::never) graph_cache_->clear();
}

void Pipeline::forget_graphs() {
  const EngineLock lock(*this);
  if (graph_cache_) graph_cache_->clear();
}

std::vector<GraphReport> Pipeline::graph_reports() {
  const EngineLock lock(*this);
  return graph_cache_ ? graph_cache_->reports() : std::vector<GraphReport>{};
}

void Pipeline::inject_faults(FaultInjection fault_injection) {
  const EngineLock lock(*this);
  fault_injection_ = std::move(fault_injection);
}

}  // namespace gpipe_fast
