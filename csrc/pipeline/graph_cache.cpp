#include "pipeline/graph_cache.h"

#include "pipeline/layouts.h"
#include "pipeline/microbatches.h"
#include "pipeline/settings.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

namespace gpipe_fast {
namespace {

// Number of a plan's mini-batches that run uncaptured before the capture.
constexpr int64_t kWarmUpRuns = 2;
// The launches of a run hide if the host enqueues it in less than this share of the time that the device takes.
constexpr double kHidden = 0.8;
// Capacity of the graph cache in captured plans.
constexpr size_t kMaxPlans = 8;
// Number of mini-batches that a plan must run, while another plan is not replayed, to take that one's place.
constexpr int64_t kRunsToReplace = 8;

// Returns why a plan cannot be captured, as far as that is known before an attempt; empty if it may be capturable.
std::string obstacle_of(const Plan& plan) {
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const StagePlan& stage = plan.stages[i];
    if (stage.device.is_cpu()) return "stage " + std::to_string(i) + " runs on the CPU";
    if (!stage.is_lowered()) return "layers run in Python, in some stage";
  }
  if (plan.check_outputs) return "its outputs are not known before it runs";
  return {};
}

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

std::vector<Stream> unique_streams(const std::vector<Stream>& streams) {
  std::vector<Stream> found;
  for (const Stream& stream : streams) {
    if (std::find(found.begin(), found.end(), stream) == found.end()) found.push_back(stream);
  }
  return found;
}

void add_latest(std::deque<RunTimer>& runs, std::optional<RunTimer> run) {
  if (!run) return;
  run->stop();
  runs.push_back(std::move(*run));
  if (static_cast<int64_t>(runs.size()) > kWarmUpRuns) runs.pop_front();
}

// Runs one action at a time: CUDA does not synchronize accesses to a graph that is being captured.
class OneAtATime final : public Work {
 public:
  explicit OneAtATime(Work& work) : work_(work) {}

  void enter_stage(int32_t stage, const std::function<void()>& run_actions) override {
    work_.enter_stage(stage, run_actions);
  }
  void run(const Action& action, CancellationToken& token) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.run(action, token);
  }

 private:
  Work& work_;
  std::mutex mutex_;
};

}  // namespace

RunTimer::RunTimer(const Stream& stream) : stream_(stream), host_begin_(std::chrono::steady_clock::now()) {
  const StreamEvent::Timing timing;
  begin_ = StreamEvent(stream_);
}

void RunTimer::stop() {
  host_ = std::chrono::steady_clock::now() - host_begin_;
  const StreamEvent::Timing timing;
  end_ = StreamEvent(stream_);
}

bool RunTimer::launches_hide() const {
  if (!end_.is_complete()) return true;
  return static_cast<double>(host_.count()) < kHidden * static_cast<double>(end_.nanoseconds_since(begin_));
}

// A plan's progress towards a captured forward.
enum class GraphCache::State {
  refused,   // it cannot be captured
  cold,      // it must run uncaptured a few more times
  warm,      // the next run captures it
  captured,  // its graph can be replayed
};

struct GraphCache::Entry {
  std::weak_ptr<const Plan> plan;  // while it is captured, `captured` owns it
  GraphReport report;
  // Layouts of the output gradients of the latest backward, if it ran uncaptured and needed no fallback segment. A
  // capture cannot run anything else, such as the search for a fallback.
  std::optional<Layouts> gradient_layouts;
  std::string settings = all_settings(), numerics;  // `numerics`: as of the capture
  std::deque<RunTimer> forwards, backwards;         // the latest uncaptured runs
  // It is captured once `capture_after` mini-batches have run uncaptured. Whenever memory runs out, `wait` doubles.
  int64_t wait = kWarmUpRuns, capture_after = kWarmUpRuns;
  // While all places are taken, `num_waited` counts its mini-batches that ran uncaptured since forward `waits_since`, in
  // which the least recently replayed plan was not replayed. `last_replay` is the number of its own latest replay.
  int64_t last_replay = 0, num_waited = 0, waits_since = 0;

  // Set while it is captured. The graphs are last, so that they are destroyed, after they have finished, before their
  // memory.
  Tensors inputs, gradients;
  std::vector<Boundary> outputs;
  std::vector<c10::Storage> arenas;
  std::optional<CapturedMiniBatch> captured;
  std::shared_ptr<Graph> forward, backward;

  // Returns whether its backward can be replayed. Only numerics are compared: the forward has chosen the operators.
  bool can_replay_backward(const GraphRun& run) const {
    return backward && !run.retain && layouts_match(layouts_of(gradients), run.tensors) &&
           numerics == numeric_settings();
  }
  // Returns whether the launches hide behind the device's work, in a forward and in a backward that ran lately.
  bool launches_hide() const {
    const auto hide = [](const RunTimer& run) { return run.launches_hide(); };
    return std::any_of(forwards.begin(), forwards.end(), hide) &&
           (backwards.empty() || std::any_of(backwards.begin(), backwards.end(), hide));
  }
  bool is_of(const Plan* other) const { return other == plan.lock().get(); }
  void drop() {
    backward.reset();
    forward.reset();
    captured.reset();
    outputs.clear();
    arenas.clear();
    inputs.clear();
    gradients.clear();
    report.forward = report.backward = false;
    report.num_nodes = report.bytes = 0;
  }
  void warm_up_again() { capture_after = report.uncaptured + wait; }
  void postpone(const std::string& reason) {
    drop();
    wait *= 2;
    warm_up_again();
    report.postponed = reason;
  }
  void add(const Graph& graph) {
    report.num_nodes += graph.num_nodes();
    report.bytes += graph.bytes();
  }
};

GraphCache::GraphCache(std::shared_ptr<const Transport> transport, Engine engine)
    : transport_(std::move(transport)),
      engine_(std::move(engine)),
      streams_(transport_->streams()),
      maker_(make_graph_maker()) {}

GraphCache::~GraphCache() = default;

GraphCache::Entry& GraphCache::entry_of(const std::shared_ptr<const Plan>& plan) {
  for (Entry& entry : entries_) {
    if (entry.is_of(plan.get())) return entry;
  }
  remove_dead_entries();
  Entry& entry = entries_.emplace_front();
  entry.plan = plan;
  entry.report.obstacle = maker_ ? maker_->obstacle() : "gpipe_fast was built without CUDA";
  if (entry.report.obstacle.empty()) entry.report.obstacle = obstacle_of(*plan);
  return entry;
}

template <class Body>
void GraphCache::on_stage_stream(size_t stage, const Body& body) {
  const Stream& work = transport_->work(static_cast<int32_t>(stage));
  const bool on_other_device = work.device() != graph_stream().device();
  if (on_other_device) work.wait(StreamEvent(graph_stream()));
  {
    const Stream::Guard current(on_other_device ? work : graph_stream());
    body();
  }
  if (on_other_device) graph_stream().wait(StreamEvent(work));
}

GraphCache::State GraphCache::state_of(Entry& entry, const MiniBatch& minibatch) const {
  if (entry.forward && !entry.captured->has_same_addresses(minibatch)) entry.drop();
  if (const std::string settings = all_settings(); settings != entry.settings) {
    entry.drop();
    entry.warm_up_again();
    entry.settings = settings;
  }
  if (!entry.report.obstacle.empty()) {
    entry.drop();
    return State::refused;
  }
  if (entry.forward) return State::captured;
  const bool always = capture_when_ == Capture::always;
  const bool warm = entry.report.uncaptured >= entry.capture_after && (always || !entry.forwards.empty()) &&
                    (entry.gradient_layouts || !minibatch.plan()->backward);
  if (!warm) return State::cold;
  if (always || !entry.launches_hide()) return State::warm;
  entry.report.postponed = "the device takes longer than the launches, so a graph would gain nothing";
  return State::cold;
}

const std::vector<Boundary>* GraphCache::forward(const std::shared_ptr<MiniBatch>& minibatch,
                                                 const GraphRun& run, const MakeMiniBatch& make_other) {
  Entry& entry = entry_of(minibatch->plan());
  ++num_forwards_;
  if (in_flight()) return nullptr;
  switch (state_of(entry, *minibatch)) {
    case State::refused:
    case State::cold:
      return nullptr;
    case State::warm:
      if (!make_room_for(entry)) return nullptr;
      try {
        capture_both(entry, run, make_other);
      } catch (const c10::OutOfMemoryError&) {
        entry.postpone("memory ran out while it was captured");
      }
      return entry.forward ? replay_forward(entry, minibatch, run) : nullptr;
    case State::captured:
      return replay_forward(entry, minibatch, run);
  }
  return nullptr;
}

// A plan is dead if nobody else can run it any more.
void GraphCache::remove_dead_entries() {
  entries_.remove_if([](const Entry& entry) { return entry.plan.use_count() == (entry.captured ? 1 : 0); });
}

bool GraphCache::make_room_for(Entry& entry) {
  remove_dead_entries();
  Entry* oldest = nullptr;
  size_t num_captured = 0;
  for (Entry& other : entries_) {
    if (!other.forward) continue;
    ++num_captured;
    if (oldest == nullptr || other.last_replay < oldest->last_replay) oldest = &other;
  }
  if (num_captured < kMaxPlans) return true;
  if (entry.waits_since < oldest->last_replay) {
    entry.waits_since = num_forwards_;
    entry.num_waited = 0;
  }
  if (++entry.num_waited < kRunsToReplace) return false;
  oldest->drop();
  oldest->warm_up_again();
  entry.num_waited = 0;
  return true;
}

const std::vector<Boundary>* GraphCache::replay_forward(Entry& entry,
                                                        const std::shared_ptr<MiniBatch>& minibatch,
                                                        const GraphRun& run) {
  begin(run, entry.inputs);
  for (size_t i = 0; i < minibatch->plan()->stages.size(); ++i) {
    if (entry.captured->needs_keys(i))
      on_stage_stream(i, [&] { entry.captured->write_keys_of(*minibatch, i); });
  }
  entry.forward->replay(graph_stream());
  entry.captured->share_forward(*minibatch, entry.forward);
  end(run.minibatch);
  last_replayed_ = minibatch;
  entry.last_replay = num_forwards_;
  ++entry.report.replays;
  return &entry.outputs;
}

bool GraphCache::in_flight() const {
  const std::shared_ptr<const MiniBatch> latest = last_replayed_.lock();
  return latest && latest->can_run_backward();
}

bool GraphCache::ran_forward_of(const Entry& entry, const MiniBatch& minibatch) const {
  return entry.forward && entry.is_of(minibatch.plan().get()) && last_replayed_.lock().get() == &minibatch;
}

bool GraphCache::has_forward(const Plan& plan) const {
  return !in_flight() && std::any_of(entries_.begin(), entries_.end(),
                                     [&](const Entry& entry) { return entry.is_of(&plan) && entry.forward; });
}

bool GraphCache::has_backward(const GraphRun& run) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return ran_forward_of(entry, run.minibatch) && entry.can_replay_backward(run);
  });
}

bool GraphCache::backward(const GraphRun& run) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return ran_forward_of(entry, run.minibatch); });
  if (found == entries_.end() || !found->report.obstacle.empty()) return false;
  Entry& entry = *found;
  if (!entry.can_replay_backward(run)) return false;
  begin(run, entry.gradients);
  entry.backward->replay(graph_stream());
  end(run.minibatch);
  entry.captured->copy_backward(run.minibatch);
  return true;
}

// Captures the work of `body`; null if it cannot be captured, and then the plan runs uncaptured from now on.
template <class Body>
std::shared_ptr<Graph> GraphCache::capture(Entry& entry, const Body& body) {
  ran_uncaptured_ = true;
  std::shared_ptr<Graph> graph;
  try {
    graph = maker_->capture(streams_, [&] {
      transport_->free_blocks();
      body();
    });
  } catch (const Cancelled&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    transport_->free_blocks();
    throw;
  } catch (const std::exception& error) {
    entry.report.obstacle = first_line(error);
  }
  transport_->free_blocks();
  return graph;
}

void GraphCache::capture_both(Entry& entry, const GraphRun& run, const MakeMiniBatch& make_other) {
  // Until both are captured, holds tensors that the forward used on several streams: the backward must not reuse
  // their memory on one of them.
  const Stream::KeepAlive keep_alive(streams_);
  maker_->free_cached_memory(streams_);
  entry.numerics = numeric_settings();
  capture_forward(entry, run, make_other);
  if (entry.forward && run.minibatch.plan()->backward) capture_backward(entry);
  if (!entry.report.obstacle.empty()) return entry.drop();
  const auto alias = maker_->alias();
  for (Boundary& part : entry.outputs) {
    for (at::Tensor& tensor : part.tensors) tensor = alias(tensor);
  }
  entry.captured->release();
}

void GraphCache::capture_forward(Entry& entry, const GraphRun& run, const MakeMiniBatch& make_other) {
  entry.inputs = copy_tensors(run);
  MiniBatch& minibatch = entry.captured.emplace(make_other()).minibatch();
  minibatch.make_random_keys();
  entry.captured->begin_forward(run.split_tensors(entry.inputs));
  for (size_t i = 0; i < minibatch.plan()->stages.size(); ++i) {
    const Stream::Guard current(transport_->work(static_cast<int32_t>(i)));
    if (auto arena = entry.captured->hold_arena(i)) entry.arenas.push_back(std::move(*arena));
  }
  entry.forward = capture(entry, [&] {
    minibatch.replicate();
    OneAtATime work(minibatch);
    engine_(*minibatch.plan()->forward, work);
  });
  if (!entry.forward) return;
  entry.outputs = minibatch.take_outputs();
  entry.captured->end_forward(maker_->alias());
  entry.report.forward = true;
  entry.add(*entry.forward);
}

// Captures the backward for gradients with the layouts of the latest ones, before the actual gradients exist.
void GraphCache::capture_backward(Entry& entry) {
  MiniBatch& minibatch = entry.captured->minibatch();
  const Plan& plan = *minibatch.plan();
  std::optional<Tensors> gradients;
  on_stage_stream(plan.stages.size() - 1, [&] {
    gradients = zeros_with_layouts(*entry.gradient_layouts, plan.stages.back().device);
  });
  if (!gradients) {
    entry.report.obstacle = "a gradient of its outputs has gaps in memory or overlaps itself";
    return;
  }
  entry.gradients = std::move(*gradients);
  const PartLengths sizes = lengths_of(entry.outputs, plan.cat_dim);
  minibatch.begin_backward(split_gradients(entry.gradients, sizes, plan.num_microbatches(), plan.cat_dim),
                           /*retain=*/false);
  entry.backward = capture(entry, [&] {
    OneAtATime work(minibatch);
    engine_(*plan.backward, work);
  });
  if (!entry.backward) return;
  entry.captured->end_backward(maker_->alias());
  entry.report.backward = true;
  entry.add(*entry.backward);
}

// Returns copies of the run's tensors at the addresses that the graph will read. They are initialized with this run's
// values before the capture.
Tensors GraphCache::copy_tensors(const GraphRun& run) {
  before_run();
  Tensors copies;
  on_stage_stream(run.stage, [&] {
    for (const at::Tensor& tensor : run.tensors)
      copies.push_back(tensor.defined() ? empty_with_strides(tensor) : at::Tensor());
  });
  begin(run, copies);
  ran_uncaptured_ = true;
  return copies;
}

void GraphCache::begin(const GraphRun& run, const Tensors& into) {
  for (const Stream& caller : unique_streams(run.minibatch.caller_streams()))
    graph_stream().wait(StreamEvent(caller));
  for (const auto& [caller, event] : caller_events_) graph_stream().wait(event);
  caller_events_.clear();
  if (ran_uncaptured_) {
    for (const Stream& stream : streams_) graph_stream().wait(StreamEvent(stream));
    ran_uncaptured_ = false;
  }
  on_stage_stream(run.stage, [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (size_t i = 0; i < into.size(); ++i) {
      if (!into[i].defined()) continue;
      const bool same = into[i].strides() == run.tensors[i].strides();
      const at::Tensor from = same ? unexpanded(run.tensors[i]) : run.tensors[i];
      (same ? unexpanded(into[i]) : into[i]).copy_(from, /*non_blocking=*/true);
      Stream::current_on(into[i].device()).record_use(run.tensors[i]);
    }
  });
}

void GraphCache::end(const MiniBatch& minibatch) {
  last_replay_.emplace(graph_stream());
  for (const Stream& caller : unique_streams(minibatch.caller_streams())) caller.wait(*last_replay_);
}

void GraphCache::before_run() {
  ran_uncaptured_ = true;
  if (!last_replay_) return;
  for (const Stream& stream : streams_) stream.wait(*last_replay_);
  last_replay_.reset();
}

void GraphCache::after_forward(const std::shared_ptr<const Plan>& plan, std::optional<RunTimer> timer) {
  Entry& entry = entry_of(plan);
  ++entry.report.uncaptured;
  add_latest(entry.forwards, std::move(timer));
}

void GraphCache::after_backward(const GraphRun& run, std::optional<RunTimer> timer) {
  for (Entry& entry : entries_) {
    if (!entry.is_of(run.minibatch.plan().get())) continue;
    entry.gradient_layouts.reset();
    if (run.minibatch.used_no_fallback()) entry.gradient_layouts = layouts_of(run.tensors);
    add_latest(entry.backwards, std::move(timer));
  }
}

void GraphCache::after_use(const std::vector<Stream>& caller_streams) {
  if (!last_replay_) return;
  for (const Stream& caller : unique_streams(caller_streams)) {
    const auto same = [&](const auto& used) { return used.first == caller; };
    caller_events_.erase(std::remove_if(caller_events_.begin(), caller_events_.end(), same),
                         caller_events_.end());
    caller_events_.emplace_back(caller, StreamEvent(caller));
  }
}

bool GraphCache::can_free_graphs() const {
  return !in_flight() && std::any_of(entries_.begin(), entries_.end(),
                                     [](const Entry& entry) { return entry.forward != nullptr; });
}

bool GraphCache::free_graphs() {
  if (!can_free_graphs()) return false;
  last_replayed_.reset();
  for (Entry& entry : entries_) {
    if (entry.forward) entry.postpone("memory ran out in a mini-batch that was not replayed");
  }
  return true;
}

void GraphCache::clear() { entries_.clear(); }

std::vector<GraphReport> GraphCache::reports() const {
  std::vector<GraphReport> found;
  for (const Entry& entry : entries_) found.push_back(entry.report);
  return found;
}

}  // namespace gpipe_fast
