#include "engine/engine.h"

#include "check.h"
#include "engine/cores.h"
#include "engine/recorder.h"
#include "engine/slots.h"

#include <unistd.h>

#include <chrono>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace gpipe_fast {
namespace {

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

// The worker threads and their shared state.
struct Engine::Pool {
  Pool(int32_t num_stages, int64_t recorded)
      : process(getpid()),
        cores(num_stages),
        forward(num_stages),
        backward(num_stages),
        recorders(num_stages) {
    for (Recorder& recorder : recorders) recorder.resize(recorded);
    try {
      for (int32_t stage = 0; stage < num_stages; ++stage) {
        threads.emplace_back([this, stage] { serve(stage); });
      }
    } catch (...) {  // the system cannot create another thread
      stop();
      throw;
    }
  }
  ~Pool() { stop(); }

  void stop() {
    stopping.store(true, std::memory_order_seq_cst);
    start.wake();
    for (std::thread& thread : threads) thread.join();
  }

  void serve(int32_t stage) {
    for (int64_t done = 0;; ++done) {
      start.wait([&] { return generation.load(std::memory_order_seq_cst) > done || stopping.load(); });
      if (generation.load(std::memory_order_seq_cst) <= done) return;
      cores.enter(stage);
      walk(stage);
      cores.leave(stage);
      if (running.fetch_sub(1, std::memory_order_seq_cst) == 1) finish.wake();
    }
  }

  void walk(int32_t stage) {
    const std::vector<Action>& list = actions->of(stage);
    if (list.empty()) return;
    const Action* current = &list.front();
    std::string place;
    try {
      work->enter(stage, [&] {
        for (const Action& action : list) {
          current = &action;
          if (cancellation.covers(action.rank) || !step(action, place)) return;
        }
      });
    } catch (const Stopped&) {
      // If this action was not cancelled, the exception came from elsewhere, such as an engine inside the
      // action. It is then a failure: otherwise no cancellation would wake the waiting stages.
      if (!cancellation.covers(current->rank)) fail(*current, std::current_exception(), std::move(place));
    } catch (...) {
      fail(*current, std::current_exception(), std::move(place));
    }
  }

  // Runs one action. Returns false if it was cancelled while waiting at its slot. If the action throws,
  // `place` may name the part that failed.
  bool step(const Action& action, std::string& place) {
    struct Cancelled final : Watch {
      Cancelled(const Cancellation& cancellation, int64_t rank, std::string& place)
          : cancellation(cancellation), rank(rank), place(place) {}
      void look() override {
        if (cancellation.covers(rank)) throw Stopped();
      }
      void blame(const std::string& name) override { place = name; }
      const Cancellation& cancellation;
      const int64_t rank;
      std::string& place;
    } watch(cancellation, action.rank, place);

    Recorder& recorder = recorders[action.stage];
    Slots* const slots = slots_of(action);
    const int64_t run = generation.load(std::memory_order_relaxed);
    int64_t begin = recorder.on() ? now() : 0;
    if (slots != nullptr) {
      const bool ready = wait(*slots, action);
      if (recorder.on()) {
        const int64_t end = now();
        recorder.add({action, run, true, begin, end});
        begin = end;
      }
      if (!ready) return false;
    }
    work->run(action, watch);
    if (recorder.on()) recorder.add({action, run, false, begin, now()});
    if (slots != nullptr) sends(action) ? slots->send() : slots->receive();
    return true;
  }

  // Returns the slots through which the action synchronises with a neighbouring stage; null for a local
  // action.
  Slots* slots_of(const Action& action) {
    switch (action.kind) {
      case ActionKind::send_forward:
        return &forward[action.stage];
      case ActionKind::recv_forward:
        return &forward[action.stage - 1];
      case ActionKind::send_backward:
        return &backward[action.stage];
      case ActionKind::recv_backward:
        return &backward[action.stage + 1];
      default:
        return nullptr;
    }
  }
  static bool sends(const Action& action) {
    return action.kind == ActionKind::send_forward || action.kind == ActionKind::send_backward;
  }

  bool wait(Slots& slots, const Action& action) {
    return sends(action) ? slots.wait_for_room(actions->capacity(), action.rank, cancellation)
                         : slots.wait_for_tensor(action.rank, cancellation);
  }

  void fail(const Action& action, std::exception_ptr error, std::string place) {
    {
      std::lock_guard<std::mutex> lock(failure_mutex);
      if (!failure || action.rank < failure->action.rank)
        failure = Failure{std::move(error), action, std::move(place)};
    }
    cancel_from(action.rank);
  }

  void cancel_from(int64_t rank) {
    cancellation.cancel_from(rank);
    for (Slots& slots : forward) slots.wake();
    for (Slots& slots : backward) slots.wake();
  }

  void start_run(const Actions& new_actions, Work& new_work) {
    actions = &new_actions;
    work = &new_work;
    for (Slots& slots : forward) slots.reset();
    for (Slots& slots : backward) slots.reset();
    running.store(static_cast<int32_t>(threads.size()), std::memory_order_relaxed);
    generation.fetch_add(1, std::memory_order_seq_cst);
    start.wake();
  }

  const pid_t process;
  Cores cores;

  // State of the current run. The caller writes it while no worker is running.
  const Actions* actions = nullptr;
  Work* work = nullptr;
  Cancellation cancellation;
  std::mutex failure_mutex;
  std::optional<Failure> failure;

  std::vector<Slots> forward;   // [stage]: from this stage to the next
  std::vector<Slots> backward;  // [stage]: from this stage to the previous one
  std::vector<Recorder> recorders;

  std::atomic<int64_t> generation{0};
  std::atomic<int32_t> running{0};
  std::atomic<bool> stopping{false};
  Waiter start, finish;
  std::vector<std::thread> threads;
};

Engine::Engine(int32_t num_stages) : num_stages_(num_stages) {
  GPIPE_CHECK_ARG(num_stages > 0, "an engine must have at least one stage, got ", num_stages);
}

Engine::~Engine() {
  // After fork(), the parent's threads do not exist in the child, so their shared state is leaked instead of
  // destroyed.
  if (pool_ && pool_->process != getpid()) (void)pool_.release();
}

std::optional<Failure> Engine::run(const Actions& actions, Work& work, const std::function<void()>& poll) {
  GPIPE_CHECK_ARG(actions.num_stages() == num_stages_, "the engine has ", num_stages_,
                  " stages, but received actions for ", actions.num_stages());
  Pool& pool = begin();
  pool.start_run(actions, work);
  std::exception_ptr thrown;
  const auto done = [&] { return pool.running.load(std::memory_order_seq_cst) == 0; };
  while (!pool.finish.wait_for(done, kPollInterval)) {
    if (!poll || thrown) continue;
    try {
      poll();
    } catch (...) {
      thrown = std::current_exception();
      pool.cancel_from(Cancellation::kEverything);
    }
  }
  const bool interrupted = end();
  // Always moved out of the pool, so that the pool does not keep an exception alive.
  std::optional<Failure> failure = std::exchange(pool.failure, std::nullopt);
  if (thrown) std::rethrow_exception(thrown);
  if (interrupted) throw Stopped();
  return failure;
}

Engine::Pool& Engine::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (pool_ && pool_->process != getpid()) (void)pool_.release();
  if (!pool_) pool_ = std::make_unique<Pool>(num_stages_, recorded_);
  pool_->cores.arrange();
  running_ = true;
  return *pool_;
}

bool Engine::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  running_ = false;
  pool_->cancellation.reset();
  return std::exchange(interrupted_, false);
}

void Engine::after_fork() {
  new (&mutex_) std::mutex;  // a thread that does not exist in the child may have held the lock
  running_ = interrupted_ = false;
  (void)pool_.release();
}

void Engine::interrupt() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!running_) return;
  interrupted_ = true;
  pool_->cancel_from(Cancellation::kEverything);
}

void Engine::record(int64_t events_per_stage) {
  GPIPE_CHECK_ARG(events_per_stage >= 0, "cannot keep ", events_per_stage, " events");
  recorded_ = events_per_stage;
  if (!pool_ || pool_->process != getpid()) return;
  for (Recorder& recorder : pool_->recorders) recorder.resize(recorded_);
}

std::vector<std::vector<Event>> Engine::events() const {
  std::vector<std::vector<Event>> result(num_stages_);
  for (int32_t stage = 0; pool_ && stage < num_stages_; ++stage) {
    result[stage] = pool_->recorders[stage].latest();
  }
  return result;
}

}  // namespace gpipe_fast
