// The engine: one worker per stage walks that stage's actions. Free of torch.
//
// It knows no schedule by name and no tensor: an action is run by an abstract Work, and two stages meet only at slots,
// and at the turns of their group.
#pragma once

#include "engine/actions.h"
#include "engine/cancellation_token.h"

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace gpipe_fast {

// What a stage keeps of one micro-batch for its backward, in bytes.
struct KeptBytes {
  int64_t boundary = 0;  // tensors that entered the stage
  int64_t saved = 0;
  int64_t scratch = 0;  // what the programs of the micro-batch need while they run
};

// The times of an action on a device that executes it later than the host enqueues it.
class DeviceTimes {
 public:
  // Nanoseconds of the steady clock. A tensor that a send sends arrives at `arrival`.
  struct Times {
    int64_t begin, end, arrival;
  };
  virtual ~DeviceTimes() = default;
  // Blocks until the device has executed the action.
  virtual Times get() const = 0;
};

// What is recorded of an action besides the host's times.
struct Observed {
  KeptBytes kept;                            // after the action
  std::shared_ptr<const DeviceTimes> times;  // null if the host executes it
};

// The work of a mini-batch. A stage's worker makes all calls for that stage, in the order of its actions; everything
// that the thread of a send wrote before is visible to the matching receive.
class Work {
 public:
  virtual ~Work() = default;
  // Called once per run and stage, if the stage has actions, to set up its worker. Calls `run_actions` once, which runs
  // all actions of the stage.
  virtual void enter_stage(int32_t stage, const std::function<void()>& run_actions) {
    (void)stage;
    run_actions();
  }
  virtual void run(const Action& action, CancellationToken& token) = 0;
  // Called after an action that is recorded, by the same thread, before other stages see that it has run.
  virtual Observed observe(const Action& action) const {
    (void)action;
    return {};
  }
  // Returns the rank from which actions are cancelled when the one of this rank fails.
  virtual int64_t cancelled_by(int64_t rank) const { return rank; }
  // Called when the actions of this rank and higher ones are cancelled, by any thread, perhaps several times. Wakes
  // those that wait for something that the engine does not know.
  virtual void cancel_from(int64_t rank) { (void)rank; }
};

struct Failure {
  std::exception_ptr error;
  Action action;
  std::string layer_title;  // see CancellationToken::set_layer_title; may be empty
};

// Begin and end of an action, or of the wait at its slot just before, in nanoseconds of the steady clock.
struct Event {
  Action action;
  int64_t run;  // number of the run, which the engine counts
  bool is_wait;
  int64_t begin;
  int64_t end;
  Observed observed = {};
};

// How often a thread that waits for a run polls.
constexpr auto kPollInterval = std::chrono::milliseconds(20);

// Not thread safe, except for interrupt(): only one run at a time. The first run creates the workers, which later runs
// reuse. After fork() the child creates its own.
class Engine {
 public:
  explicit Engine(int32_t num_stages);
  // Joins the workers.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Runs all actions and returns when every worker is done; the engine can then run again.
  //
  // Returns the failure of lowest rank, whatever the timing, because an action that fails cancels only actions of
  // higher rank, unless the work cancels more. The calling thread sleeps, and calls `poll` about every 20 ms. An
  // exception from `poll` cancels all actions, and is rethrown when all workers have stopped. Throws Cancelled if
  // interrupted.
  std::optional<Failure> run(const Actions& actions, Work& work, const std::function<void()>& poll = {});

  // Cancels the current run. May be called from any thread.
  void interrupt();

  // Call in the child of a fork: discards the runs of the parent's other threads.
  void after_fork();

  // Records events from now on and keeps the latest ones of each stage; 0 turns recording off.
  void record(int64_t events_per_stage);
  int64_t recorded() const { return recorded_; }
  // Returns the recorded events by stage, in order of time.
  std::vector<std::vector<Event>> events() const;

  int32_t num_stages() const { return num_stages_; }

 private:
  struct Pool;

  Pool& begin();
  bool end();  // returns whether the run was interrupted

  int32_t num_stages_;
  int64_t recorded_ = 0;
  std::mutex mutex_;  // guards the flags below, and the creation and destruction of the pool
  bool running_ = false;
  bool interrupted_ = false;
  std::unique_ptr<Pool> pool_;
};

}  // namespace gpipe_fast
