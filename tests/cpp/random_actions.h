// Random schedules for the engine tests: any feasible order of actions, with ranks that prove its feasibility.
#pragma once

#include "engine/actions.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <random>
#include <utility>
#include <vector>

namespace gpipe_fast {

using Random = std::mt19937;

enum class Order { fill_drain, one_forward_one_backward, any };

struct Shape {
  int32_t num_stages;
  int32_t num_microbatches;
  int64_t num_slots;
  int32_t num_groups = 0;  // stage k is in group k % num_groups; 0: each stage is alone
};

// Simulates a pipeline: repeatedly picks a random stage and one of its feasible next actions, until all actions are
// done. The rank of an action is its position in this sequence. With Order::any a stage's order is random, too.
class ScheduleGenerator {
 public:
  ScheduleGenerator(const Shape& shape, Order order, bool forward, bool backward)
      : shape_(shape), fixed_orders_(shape.num_stages) {
    if (forward) {
      lanes_.push_back(
          {{ActionKind::recv_forward, ActionKind::forward, ActionKind::send_forward}, 1, {}, {}});
    }
    if (backward) {
      lanes_.push_back(
          {{ActionKind::recv_backward, ActionKind::backward, ActionKind::send_backward}, -1, {}, {}});
    }
    const bool is_fill_drain = order == Order::fill_drain;
    const int32_t M = shape.num_microbatches;
    for (int32_t k = 0; order != Order::any && k < shape.num_stages; ++k) {
      const int32_t num_warmup = is_fill_drain ? M : std::min(M, shape.num_stages - 1 - k);
      for (int32_t i = 0; i < M + num_warmup; ++i) {
        if (i < M && forward) append_microbatch(lanes_.front(), k, i);
        if (i >= num_warmup && backward)
          append_microbatch(lanes_.back(), k, is_fill_drain ? M - 1 - (i - num_warmup) : i - num_warmup);
      }
    }
  }

  // Returns a random schedule. If a fixed order needs more than the shape's capacity, uses the capacity it needs.
  Actions generate(Random& random) {
    for (;; ++shape_.num_slots) {
      auto stages = simulate(random);
      if (!stages) continue;
      std::vector<int32_t> groups;
      for (int32_t k = 0; shape_.num_groups > 0 && k < shape_.num_stages; ++k)
        groups.push_back(k % shape_.num_groups);
      return Actions(std::move(*stages), shape_.num_slots, std::move(groups));
    }
  }

 private:
  // One direction: a micro-batch is received, computed and sent, where the stage has the neighbour.
  struct LaneState {
    std::array<ActionKind, 3> kinds;
    int32_t step;                               // from a stage to the one it sends to
    std::vector<std::vector<int32_t>> done;     // number of `kinds` done, by stage and micro-batch
    std::vector<std::deque<int32_t>> arriving;  // micro-batches in flight to each stage
  };

  bool is_stage(int32_t k) const { return k >= 0 && k < shape_.num_stages; }
  // Returns the index in `kinds` of the first action from `done` on that stage k has; 3 if none is left.
  int32_t next_kind(const LaneState& lane, int32_t k, int32_t done) const {
    if (done == 0 && !is_stage(k - lane.step)) done = 1;
    return done == 2 && !is_stage(k + lane.step) ? 3 : done;
  }
  // Appends all actions of a micro-batch to the fixed order of stage k.
  void append_microbatch(const LaneState& lane, int32_t k, int32_t m) {
    for (int32_t i = next_kind(lane, k, 0); i < 3; i = next_kind(lane, k, i + 1))
      fixed_orders_[k].push_back({lane.kinds[i], m});
  }

  // Returns whether action i of `kinds` is feasible now and, in a fixed order, next.
  bool is_feasible(const LaneState& lane, int32_t k, int32_t m, int32_t i) const {
    if (i == 3) return false;
    if (i == 0 && (lane.arriving[k].empty() || lane.arriving[k].front() != m)) return false;
    if (i == 1 && lane.step < 0 && lanes_.size() == 2 && lanes_.front().done[k][m] < 2) return false;
    if (i == 2 && static_cast<int64_t>(lane.arriving[k + lane.step].size()) == shape_.num_slots) return false;
    return fixed_orders_[k].empty() ||
           fixed_orders_[k][stages_[k].size()] == std::make_pair(lane.kinds[i], m);
  }

  // Returns the actions of every stage; nullopt if the simulation deadlocks.
  std::optional<std::vector<std::vector<Action>>> simulate(Random& random) {
    stages_.assign(shape_.num_stages, {});
    for (LaneState& lane : lanes_) {
      lane.done.assign(shape_.num_stages, std::vector<int32_t>(shape_.num_microbatches, 0));
      lane.arriving.assign(shape_.num_stages, {});
    }
    struct Candidate {
      LaneState* lane;
      int32_t stage, microbatch;
    };
    const uint32_t bias = random() % 3;  // 0 favours early stages, 1 late stages, 2 none
    for (int64_t rank = 0;; ++rank) {
      std::vector<Candidate> candidates;
      bool finished = true;
      for (int32_t k = 0; k < shape_.num_stages; ++k) {
        for (LaneState& lane : lanes_) {
          for (int32_t m = 0; m < shape_.num_microbatches; ++m) {
            const int32_t i = next_kind(lane, k, lane.done[k][m]);
            finished &= i == 3;
            if (is_feasible(lane, k, m, i)) candidates.push_back({&lane, k, m});
          }
        }
      }
      if (finished) return stages_;
      if (candidates.empty()) return std::nullopt;
      size_t chosen = random() % candidates.size();
      if (bias < 2 && random() % 4 != 0) chosen = bias == 0 ? 0 : candidates.size() - 1;
      perform(*candidates[chosen].lane, candidates[chosen].stage, candidates[chosen].microbatch, rank);
    }
  }

  void perform(LaneState& lane, int32_t k, int32_t m, int64_t rank) {
    const int32_t i = next_kind(lane, k, lane.done[k][m]);
    if (i == 0) lane.arriving[k].pop_front();
    if (i == 2) lane.arriving[k + lane.step].push_back(m);
    lane.done[k][m] = i + 1;
    stages_[k].push_back({lane.kinds[i], k, m, rank});
  }

  Shape shape_;
  std::vector<LaneState> lanes_;
  std::vector<std::vector<std::pair<ActionKind, int32_t>>>
      fixed_orders_;  // fixed order by stage; empty: any order
  std::vector<std::vector<Action>> stages_;
};

}  // namespace gpipe_fast
