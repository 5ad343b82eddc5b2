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

inline int32_t below(Random& random, int64_t bound) { return static_cast<int32_t>(random() % bound); }
inline void sleep_us(int64_t duration) { std::this_thread::sleep_for(std::chrono::microseconds(duration)); }

inline void delay(Random& random) {
  const uint32_t what = random() % 16;
  if (what == 0) sleep_us(below(random, 60));
  if (what == 1) std::this_thread::yield();
}

// The exceptions that actions throw, and a description of each.
struct Bare {
  int64_t rank;
};
struct InEnter : std::exception {};

inline void throw_for(int64_t rank) {
  if (rank % 3 == 0) throw std::runtime_error(std::to_string(rank));
  if (rank % 3 == 1) throw std::out_of_range(std::to_string(rank));
  throw Bare{rank};
}

inline std::string describe(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::runtime_error& e) {
    return std::string("runtime_error ") + e.what();
  } catch (const std::out_of_range& e) {
    return std::string("out_of_range ") + e.what();
  } catch (const Bare& e) {
    return "Bare " + std::to_string(e.rank);
  } catch (const InEnter&) {
    return "InEnter";
  } catch (const Stopped&) {
    return "Stopped";
  }
}

inline std::string description_for(int64_t rank) {
  static const char* const kNames[] = {"runtime_error ", "out_of_range ", "Bare "};
  return kNames[rank % 3] + std::to_string(rank);
}

// The failures and endless actions of a run.
struct Trouble {
  std::set<int64_t> failing;                        // ranks
  int32_t failing_before = -1, failing_after = -1;  // stages whose enter() throws before or after walk()
  int64_t endless = -1;                             // rank of an action that runs until it is cancelled

  // Returns the lowest rank that fails and the description of its exception; -1 if none fails.
  std::pair<int64_t, std::string> first(const Actions& actions) const {
    std::map<int64_t, std::string> all;
    if (failing_after >= 0) all[actions.of(failing_after).back().rank] = "InEnter";
    for (int64_t rank : failing) all[rank] = description_for(rank);
    if (failing_before >= 0) all[actions.of(failing_before).front().rank] = "InEnter";
    if (all.empty()) return {-1, ""};
    return *all.begin();
  }
};

// Passes numbers as a pipeline passes tensors, through plain memory, so that a missing happens-before relation is a
// data race. Micro-batch m enters stage k as 100 m + k. In the last stage this number is also the gradient, which every
// backward send increments by one.
class Numbers final : public Work {
 public:
  Numbers(const Shape& shape, int64_t capacity, Random& random, Trouble trouble = {})
      : last_(shape.num_stages - 1), trouble_(std::move(trouble)), stages_(shape.num_stages) {
    for (Stage& stage : stages_) {
      stage.random.seed(random());
      stage.activations.assign(shape.num_microbatches, kNone);
      stage.gradients.assign(shape.num_microbatches, kNone);
    }
    forward_.assign(shape.num_stages, Edge(capacity));
    backward_.assign(shape.num_stages, Edge(capacity));
  }

  void enter(int32_t k, const std::function<void()>& walk) override {
    Stage& stage = stages_[k];
    ++stage.entered;
    if (trouble_.failing_before == k) throw InEnter();
    stage.worker = std::this_thread::get_id();
    walk();
    if (trouble_.failing_after == k) throw InEnter();
  }

  void run(const Action& action, Watch& watch) override {
    const int32_t k = action.stage, m = action.microbatch;
    Stage& stage = stages_[k];
    CHECK(stage.worker == std::this_thread::get_id());
    stage.ran.push_back(action.rank);
    delay(stage.random);
    while (action.rank == trouble_.endless) {
      watch.look();
      sleep_us(10);
    }
    if (trouble_.failing.count(action.rank)) throw_for(action.rank);
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
    delay(stage.random);
  }

  // Checks that every run entered each stage once and that its actions ran in order; with `whole`, that all ran.
  void check_ran(const std::vector<const Actions*>& runs, bool whole) const {
    for (int32_t k = 0; k <= last_; ++k) {
      CHECK(stages_[k].entered == static_cast<int>(runs.size()));
      std::vector<int64_t> expected;
      for (const Actions* actions : runs) {
        for (const Action& action : actions->of(k)) expected.push_back(action.rank);
      }
      const std::vector<int64_t>& ran = stages_[k].ran;
      CHECK(ran.size() <= expected.size() && (!whole || ran.size() == expected.size()));
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
  // A ring buffer of `capacity` places. A tensor that is sent too early would overwrite an unreceived one.
  struct Edge {
    explicit Edge(int64_t capacity) : places(capacity, kNone) {}
    void put(int64_t value) { CHECK(std::exchange(places[sent++ % places.size()], value) == kNone); }
    int64_t take() { return std::exchange(places[taken++ % places.size()], kNone); }
    std::vector<int64_t> places;
    size_t sent = 0;               // written by the sender
    alignas(64) size_t taken = 0;  // written by the receiver
  };

  int32_t last_;
  Trouble trouble_;
  std::vector<Stage> stages_;
  std::vector<Edge> forward_, backward_;  // by receiving stage
};

}  // namespace gpipe_fast
