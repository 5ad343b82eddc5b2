#include "pipeline/replay.h"

#include "pipeline/layouts.h"
#include "pipeline/microbatches.h"
#include "pipeline/settings.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace gpipe_fast {
namespace {

// Number of a plan's mini-batches that run uncaptured before the capture.
constexpr int64_t kWarmUp = 2;
// Capacity of the graph cache in plans; the least recently used one is evicted first.
constexpr size_t kMostPlans = 8;

// Returns why a plan cannot be captured, as far as that is known before an attempt; empty if it may be capturable.
std::string obstacle_of(const Plan& plan) {
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const StagePlan& stage = plan.stages[i];
    const std::string name = "stage " + std::to_string(i);
    if (stage.device.is_cpu()) return name + " runs on the CPU";
    if (!stage.is_lowered()) return name + ", or a stage before it, has layers that run in Python";
  }
  if (plan.check_outputs) return "its outputs are not known before it runs";
  return {};
}

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

std::vector<Stream> distinct(const std::vector<Stream>& streams) {
  std::vector<Stream> found;
  for (const Stream& stream : streams) {
    if (std::find(found.begin(), found.end(), stream) == found.end()) found.push_back(stream);
  }
  return found;
}

}  // namespace

struct Replays::Entry {
  std::shared_ptr<const Plan> plan;
  ReplayReport report;
  // Layouts of the output gradients of the latest backward, if it ran uncaptured and needed no fallback segment. A
  // capture cannot run anything else, such as the search for a fallback.
  std::optional<Layouts> settled;
  std::string settings = settings_now(), numerics;  // `numerics`: as of the capture
  // It is captured once `due` mini-batches have run uncaptured. Whenever memory runs out, `wait` doubles.
  int64_t wait = kWarmUp, due = kWarmUp;

  // Set while it is captured. The graphs are last, so that they are destroyed, after they have finished, before their
  // memory.
  Tensors inputs, gradients;
  std::vector<Boundary> outputs;
  std::vector<c10::Storage> arenas;
  std::optional<CapturedMiniBatch> captured;
  std::shared_ptr<Graph> forward, backward;

  // Returns whether its backward can be replayed. Only numerics are compared: the forward has chosen the operators.
  bool takes(const RunOf& run) const {
    return backward && !run.retain && match(layouts_of(gradients), run.tensors) && numerics == numerics_now();
  }
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
  void warm_up_again() { due = report.as_they_are + wait; }
  void postpone(const std::string& setback) {
    drop();
    wait *= 2;
    warm_up_again();
    report.setback = setback;
  }
  void add(const Graph& graph) {
    report.num_nodes += graph.num_nodes();
    report.bytes += graph.bytes();
  }
};

Replays::Replays(std::shared_ptr<const Transport> transport, Engine engine)
    : transport_(std::move(transport)),
      engine_(std::move(engine)),
      streams_(transport_->streams()),
      maker_(make_graph_maker()) {}

Replays::~Replays() = default;

Replays::Entry& Replays::entry_of(const std::shared_ptr<const Plan>& plan) {
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.plan == plan; });
  if (found != entries_.end()) {
    entries_.splice(entries_.begin(), entries_, found);
    return entries_.front();
  }
  if (entries_.size() == kMostPlans) entries_.pop_back();
  Entry& entry = entries_.emplace_front();
  entry.plan = plan;
  entry.report.obstacle = maker_ ? maker_->obstacle() : "gpipe_fast was built without CUDA";
  if (entry.report.obstacle.empty()) entry.report.obstacle = obstacle_of(*plan);
  return entry;
}

template <class Body>
void Replays::beside(size_t stage, const Body& body) {
  const Stream& work = transport_->work(static_cast<int32_t>(stage));
  const bool apart = work.device() != origin().device();
  if (apart) work.wait(Moment(origin()));
  {
    const Stream::Current current(apart ? work : origin());
    body();
  }
  if (apart) origin().wait(Moment(work));
}

Replays::State Replays::state_of(Entry& entry, const MiniBatch& minibatch) {
  if (entry.forward && !entry.captured->has_memory_of(minibatch)) entry.drop();
  if (const std::string settings = settings_now(); settings != entry.settings) {
    entry.drop();
    entry.warm_up_again();
    entry.settings = settings;
  }
  if (!entry.report.obstacle.empty()) {
    entry.drop();
    return State::refused;
  }
  if (entry.forward) return State::captured;
  const bool warm = entry.report.as_they_are >= entry.due && (entry.settled || !entry.plan->backward);
  return warm ? State::warm : State::cold;
}

const std::vector<Boundary>* Replays::forward(const std::shared_ptr<MiniBatch>& minibatch, const RunOf& run,
                                              const Make& another) {
  Entry& entry = entry_of(minibatch->plan());
  if (in_flight()) return nullptr;
  switch (state_of(entry, *minibatch)) {
    case State::refused:
    case State::cold:
      return nullptr;
    case State::warm:
      try {
        capture_both(entry, run, another);
      } catch (const c10::OutOfMemoryError&) {
        entry.postpone("memory ran out while it was captured");
      }
      return entry.forward ? replay_forward(entry, minibatch, run) : nullptr;
    case State::captured:
      return replay_forward(entry, minibatch, run);
  }
  return nullptr;
}

const std::vector<Boundary>* Replays::replay_forward(Entry& entry,
                                                     const std::shared_ptr<MiniBatch>& minibatch,
                                                     const RunOf& run) {
  begin(run, entry.inputs);
  for (size_t i = 0; i < entry.plan->stages.size(); ++i) {
    if (entry.captured->draws(i)) beside(i, [&] { entry.captured->draw_for(*minibatch, i); });
  }
  entry.forward->replay(origin());
  entry.captured->give_forward(*minibatch, entry.forward);
  end(run.minibatch);
  latest_ = minibatch;
  ++entry.report.replays;
  return &entry.outputs;
}

bool Replays::in_flight() const {
  const std::shared_ptr<const MiniBatch> latest = latest_.lock();
  return latest && latest->kept();
}

bool Replays::serves(const Entry& entry, const MiniBatch& minibatch) const {
  return entry.forward && entry.plan == minibatch.plan() && latest_.lock().get() == &minibatch;
}

bool Replays::has_forward(const Plan& plan) const {
  return !in_flight() && std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.plan.get() == &plan && entry.forward;
  });
}

bool Replays::has_backward(const RunOf& run) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& entry) { return serves(entry, run.minibatch) && entry.takes(run); });
}

bool Replays::backward(const RunOf& run) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return serves(entry, run.minibatch); });
  if (found == entries_.end() || !found->report.obstacle.empty()) return false;
  Entry& entry = *found;
  if (!entry.takes(run)) return false;
  begin(run, entry.gradients);
  entry.backward->replay(origin());
  end(run.minibatch);
  entry.captured->give_backward(run.minibatch);
  return true;
}

// Captures the work of `body`; null if it cannot be captured, and then the plan runs uncaptured from now on.
template <class Body>
std::shared_ptr<Graph> Replays::capture(Entry& entry, const Body& body) {
  mixed_ = true;
  std::shared_ptr<Graph> graph;
  try {
    graph = maker_->capture(streams_, [&] {
      transport_->free_blocks();
      body();
    });
  } catch (const Stopped&) {
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

void Replays::capture_both(Entry& entry, const RunOf& run, const Make& another) {
  // Until both are captured, holds tensors that the forward used on several streams: the backward must not reuse
  // their memory on one of them.
  const Stream::Holding holding(streams_);
  entry.numerics = numerics_now();
  capture_forward(entry, run, another);
  if (entry.forward && entry.plan->backward) capture_backward(entry);
  if (!entry.report.obstacle.empty()) return entry.drop();
  const auto alias = maker_->alias();
  for (Boundary& part : entry.outputs) {
    for (at::Tensor& tensor : part.tensors) tensor = alias(tensor);
  }
  entry.captured->release();
}

void Replays::capture_forward(Entry& entry, const RunOf& run, const Make& another) {
  entry.inputs = own_copies(run);
  MiniBatch& minibatch = entry.captured.emplace(another()).minibatch();
  minibatch.draw();
  minibatch.begin_forward(run.cut(entry.inputs));
  entry.forward = capture(entry, [&] {
    minibatch.replicate();
    engine_(*entry.plan->forward, minibatch);
  });
  if (!entry.forward) return;
  entry.outputs = minibatch.take_outputs();
  entry.arenas = entry.captured->arenas();
  entry.captured->end_forward(maker_->alias());
  entry.report.forward = true;
  entry.add(*entry.forward);
}

// Captures the backward for gradients with the layouts of the latest ones, before the actual gradients exist.
void Replays::capture_backward(Entry& entry) {
  const Plan& plan = *entry.plan;
  std::optional<Tensors> gradients;
  beside(plan.stages.size() - 1, [&] { gradients = made_like(*entry.settled, plan.stages.back().device); });
  if (!gradients) {
    entry.report.obstacle = "a gradient of its outputs has gaps in memory or overlaps itself";
    return;
  }
  entry.gradients = std::move(*gradients);
  MiniBatch& minibatch = entry.captured->minibatch();
  const Sizes sizes = sizes_of(entry.outputs, plan.join_along);
  minibatch.begin_backward(cut_gradients(entry.gradients, sizes, plan.num_microbatches(), plan.join_along),
                           /*retain=*/false);
  entry.backward = capture(entry, [&] { engine_(*plan.backward, minibatch); });
  if (!entry.backward) return;
  entry.captured->end_backward(maker_->alias());
  entry.report.backward = true;
  entry.add(*entry.backward);
}

// Returns copies of the run's tensors at the addresses that the graph will read. They are initialized with this run's
// values before the capture.
Tensors Replays::own_copies(const RunOf& run) {
  before_run();
  Tensors copies;
  beside(run.stage, [&] {
    for (const at::Tensor& tensor : run.tensors)
      copies.push_back(tensor.defined() ? like(tensor) : at::Tensor());
  });
  begin(run, copies);
  mixed_ = true;
  return copies;
}

void Replays::begin(const RunOf& run, const Tensors& into) {
  for (const Stream& caller : distinct(run.minibatch.callers())) origin().wait(Moment(caller));
  for (const auto& [caller, moment] : used_) origin().wait(moment);
  used_.clear();
  if (mixed_) {
    for (const Stream& stream : streams_) origin().wait(Moment(stream));
    mixed_ = false;
  }
  beside(run.stage, [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (size_t i = 0; i < into.size(); ++i) {
      if (!into[i].defined()) continue;
      const bool same = into[i].strides() == run.tensors[i].strides();
      const at::Tensor from = same ? elements(run.tensors[i]) : run.tensors[i];
      (same ? elements(into[i]) : into[i]).copy_(from, /*non_blocking=*/true);
      Stream::of_thread(into[i].device()).uses(run.tensors[i]);
    }
  });
}

void Replays::end(const MiniBatch& minibatch) {
  replayed_.emplace(origin());
  for (const Stream& caller : distinct(minibatch.callers())) caller.wait(*replayed_);
}

void Replays::before_run() {
  mixed_ = true;
  if (!replayed_) return;
  for (const Stream& stream : streams_) stream.wait(*replayed_);
  replayed_.reset();
}

void Replays::after_forward(const std::shared_ptr<const Plan>& plan) { ++entry_of(plan).report.as_they_are; }

void Replays::after_backward(const RunOf& run) {
  for (Entry& entry : entries_) {
    if (entry.plan != run.minibatch.plan()) continue;
    entry.settled.reset();
    if (run.minibatch.as_expected()) entry.settled = layouts_of(run.tensors);
  }
}

void Replays::after_use(const std::vector<Stream>& callers) {
  if (!replayed_) return;
  for (const Stream& caller : distinct(callers)) {
    const auto same = [&](const auto& used) { return used.first == caller; };
    used_.erase(std::remove_if(used_.begin(), used_.end(), same), used_.end());
    used_.emplace_back(caller, Moment(caller));
  }
}

bool Replays::can_let_go() const {
  return !in_flight() && std::any_of(entries_.begin(), entries_.end(),
                                     [](const Entry& entry) { return entry.forward != nullptr; });
}

bool Replays::let_go() {
  if (!can_let_go()) return false;
  latest_.reset();
  for (Entry& entry : entries_) {
    if (entry.forward) entry.postpone("memory ran out in a mini-batch that was not replayed");
  }
  return true;
}

void Replays::forget() { entries_.clear(); }

std::vector<ReplayReport> Replays::reports() const {
  std::vector<ReplayReport> found;
  for (const Entry& entry : entries_) found.push_back(entry.report);
  return found;
}

}  // namespace gpipe_fast
