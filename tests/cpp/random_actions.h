// Random schedules for the engine tests: any feasible order of actions, with ranks that prove its feasibility.
#pragma once

#include "engine/actions.h"

#include <array>
#include <cstdint>
#include <deque>
#include <random>
#include <utility>
#include <vector>

namespace gpipe_fast {

using Random = std::mt19937;

struct Shape {
  int32_t num_stages;
  int32_t num_microbatches;
  int64_t num_slots;
  int32_t num_groups = 0;  // stage k is in group k % num_groups; 0: each stage is alone
};

// Simulates a pipeline: repeatedly picks a random stage and one of its feasible next actions, until all actions are
// done. The rank of an action is its position in this sequence.
class ScheduleGenerator {
 public:
  ScheduleGenerator(const Shape& shape, bool forward, bool backward) : shape_(shape) {
    using Kind = ActionKind;
    if (forward) lanes_.push_back({{Kind::recv_forward, Kind::forward, Kind::send_forward}, 1, {}, {}});
    if (backward) lanes_.push_back({{Kind::recv_backward, Kind::backward, Kind::send_backward}, -1, {}, {}});
  }

  // Returns a random schedule.
  Actions generate(Random& random) {
    simulate(random);
    std::vector<int32_t> groups;
    for (int32_t k = 0; shape_.num_groups > 0 && k < shape_.num_stages; ++k)
      groups.push_back(k % shape_.num_groups);
    return Actions(std::move(stages_), shape_.num_slots, std::move(groups));
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
  // Returns whether action i of `kinds` is feasible now.
  bool is_feasible(const LaneState& lane, int32_t k, int32_t m, int32_t i) const {
    if (i == 3) return false;
    if (i == 0 && (lane.arriving[k].empty() || lane.arriving[k].front() != m)) return false;
    if (i == 1 && lane.step < 0 && lanes_.size() == 2 && lanes_.front().done[k][m] < 2) return false;
    return i != 2 || static_cast<int64_t>(lane.arriving[k + lane.step].size()) < shape_.num_slots;
  }

  // Some action is always feasible, because each stage may take its actions in any order.
  void simulate(Random& random) {
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
      if (finished) return;
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
  std::vector<std::vector<Action>> stages_;
};

}  // namespace gpipe_fast
