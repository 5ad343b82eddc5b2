// The engine: one worker per stage walks that stage's actions. Free of torch.
//
// It knows no schedule by name and no tensor: an action is run by an abstract Work, and two stages meet only at slots.
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

// What a mini-batch does. Everything for one stage is called by that stage's worker, in the order of its actions; what
// a send wrote is visible to the receive that meets it.
class Work {
 public:
  virtual ~Work() = default;
  // Around all actions of a stage in one run, if it has any, to set up its worker: calls `run_actions` once.
  virtual void enter(int32_t stage, const std::function<void()>& run_actions) {
    (void)stage;
    run_actions();
  }
  virtual void run(const Action& action, CancellationToken& token) = 0;
};

struct Failure {
  std::exception_ptr error;
  Action action;
  std::string layer_title;  // see CancellationToken::blame; may be empty
};

// Begin and end of an action, or of the wait at its slot just before. Nanoseconds of the steady clock.
struct Event {
  Action action;
  int64_t run;  // which run of the engine it is of, counted up
  bool is_wait;
  int64_t begin;
  int64_t end;
};

// How often a thread that waits looks after other things.
constexpr auto kPollInterval = std::chrono::milliseconds(20);

// Not thread safe, but for interrupt(): one run at a time. The workers are made by the first run and stay. After
// fork() the child makes its own.
class Engine {
 public:
  explicit Engine(int32_t num_stages);
  // Joins the workers.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Runs all actions and returns when every worker is done; the engine can then run again.
  //
  // Of several failures the one of lowest rank is returned, whatever the timing, since an action that fails cancels
  // those of higher rank only. The calling thread sleeps, and calls `poll` about every 20 ms; what it throws
  // cancels everything, and is thrown again when all have stopped. Throws Stopped if interrupted.
  std::optional<Failure> run(const Actions& actions, Work& work, const std::function<void()>& poll = {});

  // Cancels everything that runs now. From any thread.
  void interrupt();

  // In the child of a fork that other threads of the parent did not wait for: forgets what they were doing.
  void after_fork();

  // Keeps the latest events of each stage from now on, in memory that is allocated here; 0 keeps none.
  void record(int64_t events_per_stage);
  int64_t recorded() const { return recorded_; }
  // What was recorded, by stage, in order of time.
  std::vector<std::vector<Event>> events() const;

  int32_t num_stages() const { return num_stages_; }

 private:
  struct Pool;

  Pool& begin();
  bool end();  // whether it was interrupted

  int32_t num_stages_;
  int64_t recorded_ = 0;
  std::mutex mutex_;  // of the two below, and of the pool's coming and going
  bool running_ = false;
  bool interrupted_ = false;
  std::unique_ptr<Pool> pool_;
};

}  // namespace gpipe_fast
