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
      : owner_pid(getpid()),
        cores(num_stages),
        forward(num_stages),
        backward(num_stages),
        turns(num_stages),
        recorders(num_stages) {
    for (Recorder& recorder : recorders) recorder.resize(recorded);
    try {
      for (int32_t stage = 0; stage < num_stages; ++stage) {
        threads.emplace_back([this, stage] { worker_loop(stage); });
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

  void worker_loop(int32_t stage) {
    for (int64_t done = 0;; ++done) {
      start.wait([&] { return generation.load(std::memory_order_seq_cst) > done || stopping.load(); });
      if (generation.load(std::memory_order_seq_cst) <= done) return;
      cores.enter(stage);
      run_actions(stage);
      cores.leave(stage);
      if (running.fetch_sub(1, std::memory_order_seq_cst) == 1) finish.wake();
    }
  }

  void run_actions(int32_t stage) {
    const std::vector<Action>& stage_actions = actions->of(stage);
    if (stage_actions.empty()) return;
    const Action* current = &stage_actions.front();
    std::string layer_title;
    try {
      work.load(std::memory_order_relaxed)->enter_stage(stage, [&] {
        for (const Action& action : stage_actions) {
          current = &action;
          if (cancellation.covers(action.rank) || !run_action(action, layer_title)) return;
        }
      });
    } catch (const Cancelled&) {
      // If this action was not cancelled, the exception came from elsewhere, such as an engine inside the
      // action. It is then a failure: otherwise no cancellation would wake the waiting stages.
      if (!cancellation.covers(current->rank))
        record_failure(*current, std::current_exception(), std::move(layer_title));
    } catch (...) {
      record_failure(*current, std::current_exception(), std::move(layer_title));
    }
  }

  // Runs one action. Returns false if it was cancelled while waiting at its slot. If the action throws,
  // `layer_title` may name the part that failed.
  bool run_action(const Action& action, std::string& layer_title) {
    struct ActionToken final : CancellationToken {
      ActionToken(const Cancellation& cancellation, int64_t rank, std::string& layer_title)
          : cancellation(cancellation), rank(rank), layer_title(layer_title) {}
      void check() override {
        if (cancellation.covers(rank)) throw Cancelled();
      }
      void set_layer_title(const std::string& name) override { layer_title = name; }
      const Cancellation& cancellation;
      const int64_t rank;
      std::string& layer_title;
    } token(cancellation, action.rank, layer_title);

    Recorder& recorder = recorders[action.stage];
    Slots* const slots = slots_of(action);
    const int64_t run = generation.load(std::memory_order_relaxed);
    int64_t begin = recorder.enabled() ? now() : 0;
    if (slots != nullptr || action.turn >= 0) {
      const bool ready = wait_for_turn(action) && (slots == nullptr || wait(*slots, action));
      if (recorder.enabled()) {
        const int64_t end = now();
        recorder.add({action, run, true, begin, end});
        begin = end;
      }
      if (!ready) return false;
    }
    Work& own = *work.load(std::memory_order_relaxed);
    own.run(action, token);
    if (recorder.enabled()) {
      const int64_t end = now();
      recorder.add({action, run, false, begin, end, own.observe(action)});
    }
    if (slots != nullptr) is_send(action) ? slots->send() : slots->receive();
    if (action.turn >= 0) turns[actions->group(action.stage)].pass();
    return true;
  }

  // Returns the slots through which the action synchronizes with a neighbouring stage; null for a local action, and
  // for a send to another process.
  Slots* slots_of(const Action& action) {
    if (actions->leaves_process(action)) return nullptr;
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
  static bool is_send(const Action& action) {
    return action.kind == ActionKind::send_forward || action.kind == ActionKind::send_backward;
  }

  bool wait_for_turn(const Action& action) {
    return action.turn < 0 ||
           turns[actions->group(action.stage)].wait_for(action.turn, action.rank, cancellation);
  }

  bool wait(Slots& slots, const Action& action) {
    return is_send(action) ? slots.wait_for_room(actions->num_slots(), action.rank, cancellation)
                           : slots.wait_for_tensor(action.rank, cancellation);
  }

  void record_failure(const Action& action, std::exception_ptr error, std::string layer_title) {
    const int64_t from = work.load(std::memory_order_relaxed)->cancelled_by(action.rank);
    {
      std::lock_guard<std::mutex> lock(failure_mutex);
      if (cancellation.covers(action.rank)) return;  // it may have failed because it was cancelled
      failure = Failure{std::move(error), action, std::move(layer_title)};
      cancellation.cancel_from(from);
    }
    cancel_from(from);
  }

  void cancel_from(int64_t rank) {
    cancellation.cancel_from(rank);
    for (Slots& slots : forward) slots.wake();
    for (Slots& slots : backward) slots.wake();
    for (Turns& own : turns) own.wake();
    if (Work* const current = work.load(std::memory_order_seq_cst)) current->cancel_from(rank);
  }

  void start_run(const Actions& new_actions, Work& new_work) {
    actions = &new_actions;
    work.store(&new_work, std::memory_order_seq_cst);
    for (Slots& slots : forward) slots.reset();
    for (Slots& slots : backward) slots.reset();
    for (Turns& own : turns) own.reset();
    running.store(static_cast<int32_t>(threads.size()), std::memory_order_relaxed);
    generation.fetch_add(1, std::memory_order_seq_cst);
    start.wake();
  }

  const pid_t owner_pid;
  Cores cores;

  // State of the current run. The caller writes it while no worker is running.
  const Actions* actions = nullptr;
  std::atomic<Work*> work{nullptr};  // also read by a thread that interrupts; null between runs
  Cancellation cancellation;
  std::mutex failure_mutex;
  std::optional<Failure> failure;

  std::vector<Slots> forward;   // [stage]: from this stage to the next
  std::vector<Slots> backward;  // [stage]: from this stage to the previous one
  std::vector<Turns> turns;     // [group]
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
  // After fork(), the parent's threads do not exist in the child, so their shared state is leaked instead of destroyed.
  if (pool_ && pool_->owner_pid != getpid()) (void)pool_.release();
}

std::optional<Failure> Engine::run(const Actions& actions, Work& work, const std::function<void()>& poll) {
  GPIPE_CHECK_ARG(actions.num_stages() == num_stages_, "the engine has ", num_stages_,
                  " stages, but received actions for ", actions.num_stages());
  Pool& pool = begin();
  pool.start_run(actions, work);
  std::exception_ptr poll_error;
  const auto done = [&] { return pool.running.load(std::memory_order_seq_cst) == 0; };
  while (!pool.finish.wait_for(done, kPollInterval)) {
    if (!poll || poll_error) continue;
    try {
      poll();
    } catch (...) {
      poll_error = std::current_exception();
      pool.cancel_from(Cancellation::kEverything);
    }
  }
  const bool interrupted = end();
  // Always moved out of the pool, so that the pool does not keep an exception alive.
  std::optional<Failure> failure = std::exchange(pool.failure, std::nullopt);
  if (poll_error) std::rethrow_exception(poll_error);
  if (interrupted) throw Cancelled();
  return failure;
}

Engine::Pool& Engine::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (pool_ && pool_->owner_pid != getpid()) (void)pool_.release();
  if (!pool_) pool_ = std::make_unique<Pool>(num_stages_, recorded_);
  pool_->cores.plan_moves();
  running_ = true;
  return *pool_;
}

bool Engine::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  running_ = false;
  pool_->work.store(nullptr, std::memory_order_seq_cst);
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
  if (!pool_ || pool_->owner_pid != getpid()) return;
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
