// The Work that the engine tests run: passes numbers, with delays, failures and endless actions.
#pragma once

#include "engine/engine.h"
#include "expect.h"
#include "random_actions.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace gpipe_fast {

inline int32_t random_below(Random& random, int64_t bound) { return static_cast<int32_t>(random() % bound); }
inline void sleep_us(int64_t duration) { std::this_thread::sleep_for(std::chrono::microseconds(duration)); }

inline void random_delay(Random& random) {
  const uint32_t what = random() % 16;
  if (what == 0) sleep_us(random_below(random, 60));
  if (what == 1) std::this_thread::yield();
}

// The exceptions that actions throw, and a description of each.
struct NonStandardError {
  int64_t rank;
};
struct EnterError : std::exception {};

inline void throw_for_rank(int64_t rank) {
  if (rank % 2 == 0) throw std::runtime_error(std::to_string(rank));
  throw NonStandardError{rank};
}

inline std::string describe(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::runtime_error& e) {
    return std::string("runtime_error ") + e.what();
  } catch (const NonStandardError& e) {
    return "Bare " + std::to_string(e.rank);
  } catch (const EnterError&) {
    return "EnterError";
  } catch (const Cancelled&) {
    return "Cancelled";
  }
}

inline std::string expected_description(int64_t rank) {
  return (rank % 2 == 0 ? "runtime_error " : "Bare ") + std::to_string(rank);
}

// The failures and endless actions of a run.
struct PlannedFailures {
  std::set<int64_t> failing_ranks;  // ranks
  int32_t failing_before_walk = -1,
          failing_after_walk = -1;  // stages whose enter_stage() throws before or after run_actions()
  int64_t endless_rank = -1;        // rank of an action that runs until it is cancelled

  // Returns the lowest rank that fails and the description of its exception; -1 if none fails.
  std::pair<int64_t, std::string> first(const Actions& actions) const {
    std::map<int64_t, std::string> all;
    if (failing_after_walk >= 0) all[actions.of(failing_after_walk).back().rank] = "EnterError";
    for (int64_t rank : failing_ranks) all[rank] = expected_description(rank);
    if (failing_before_walk >= 0) all[actions.of(failing_before_walk).front().rank] = "EnterError";
    if (all.empty()) return {-1, ""};
    return *all.begin();
  }
};

// Passes numbers as a pipeline passes tensors, through plain memory, so that a missing happens-before relation is a
// data race. Micro-batch m enters stage k as 100 m + k. In the last stage this number is also the gradient, which every
// backward send increments by one.
class NumberWork final : public Work {
 public:
  NumberWork(const Shape& shape, int64_t num_slots, Random& random, PlannedFailures planned = {})
      : last_(shape.num_stages - 1),
        planned_(std::move(planned)),
        stages_(shape.num_stages),
        turns_(shape.num_groups) {
    for (Stage& stage : stages_) {
      stage.random.seed(random());
      stage.activations.assign(shape.num_microbatches, kNone);
      stage.gradients.assign(shape.num_microbatches, kNone);
    }
    forward_.assign(shape.num_stages, Edge(num_slots));
    backward_.assign(shape.num_stages, Edge(num_slots));
  }

  void enter_stage(int32_t k, const std::function<void()>& run_actions) override {
    Stage& stage = stages_[k];
    ++stage.entered;
    if (planned_.failing_before_walk == k) throw EnterError();
    stage.worker = std::this_thread::get_id();
    run_actions();
    if (planned_.failing_after_walk == k) throw EnterError();
  }

  void run(const Action& action, CancellationToken& token) override {
    const int32_t k = action.stage, m = action.microbatch;
    Stage& stage = stages_[k];
    CHECK(stage.worker == std::this_thread::get_id());
    stage.ran.push_back(action.rank);
    if (action.turn == 0) turns_[k % turns_.size()] = 0;  // of an earlier run
    if (action.turn >= 0) CHECK(turns_[k % turns_.size()]++ == action.turn);
    random_delay(stage.random);
    while (action.rank == planned_.endless_rank) {
      token.check();
      sleep_us(10);
    }
    if (planned_.failing_ranks.count(action.rank)) throw_for_rank(action.rank);
    switch (action.kind) {
      case ActionKind::recv_forward:
        stage.activations[m] = forward_[k].take();
        break;
      case ActionKind::forward:
        if (k == 0) stage.activations[m] = 100 * m;
        CHECK(stage.activations[m] == 100 * m + k);
        break;
      case ActionKind::send_forward:
        forward_[k + 1].put(stage.activations[m] + 1);
        break;
      case ActionKind::recv_backward:
        stage.gradients[m] = backward_[k].take();
        break;
      case ActionKind::backward:
        if (k == last_) stage.gradients[m] = stage.activations[m];
        CHECK(stage.gradients[m] == 100 * m + last_ + (last_ - k));
        break;
      case ActionKind::send_backward:
        backward_[k - 1].put(stage.gradients[m] + 1);
        break;
      default:
        CHECK(false);  // recompute and split backward actions are not generated; the engine treats them alike
    }
    random_delay(stage.random);
    if (action.turn >= 0) CHECK(turns_[k % turns_.size()] == action.turn + 1);
  }

  // Checks that every run entered each stage once and that its actions ran in order; with `complete`, that all ran.
  void check_order(const std::vector<const Actions*>& runs, bool complete) const {
    for (int32_t k = 0; k <= last_; ++k) {
      CHECK(stages_[k].entered == static_cast<int>(runs.size()));
      std::vector<int64_t> expected;
      for (const Actions* actions : runs) {
        for (const Action& action : actions->of(k)) expected.push_back(action.rank);
      }
      const std::vector<int64_t>& ran = stages_[k].ran;
      CHECK(ran.size() <= expected.size() && (!complete || ran.size() == expected.size()));
      CHECK(std::equal(ran.begin(), ran.end(), expected.begin()));
    }
  }

 private:
  static constexpr int64_t kNone = -1;

  struct Stage {
    Random random;
    std::thread::id worker;
    int entered = 0;
    std::vector<int64_t> ran, activations, gradients;
  };
  // A ring buffer of `num_slots` places. A tensor that is sent too early would overwrite an unreceived one.
  struct Edge {
    explicit Edge(int64_t num_slots) : ring(num_slots, kNone) {}
    void put(int64_t value) { CHECK(std::exchange(ring[sent++ % ring.size()], value) == kNone); }
    int64_t take() { return std::exchange(ring[taken++ % ring.size()], kNone); }
    std::vector<int64_t> ring;
    size_t sent = 0;               // written by the sender
    alignas(64) size_t taken = 0;  // written by the receiver
  };

  int32_t last_;
  PlannedFailures planned_;
  std::vector<Stage> stages_;
  std::vector<Edge> forward_, backward_;  // by receiving stage
  std::vector<int64_t> turns_;            // by group: the number of actions so far; not atomic on purpose
};

}  // namespace gpipe_fast
