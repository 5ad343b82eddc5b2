// Actions: what every stage does, in order. Data; the schedules of gpipe_fast/schedule/ make it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gpipe_fast {

enum class ActionKind : uint8_t {
  forward,
  recompute,         // what a backward can do before its boundary gradient is there
  backward,          // all, or what a recompute left
  backward_inputs,   // up to the boundary gradient for the stage before
  backward_weights,  // what that left
  send_forward,      // boundary activation to the next stage
  recv_forward,
  send_backward,  // boundary gradient to the stage before
  recv_backward,
};

struct Action {
  ActionKind kind;
  int32_t stage;
  int32_t microbatch;
  // Position in schedule order: no other action's, and higher than that of everything it waits for.
  int64_t rank;

  // In the field's notation: 2F0 is stage 2, forward, micro-batch 0.
  std::string name() const;
};

// The actions of every stage, checked once.
class Actions {
 public:
  // Throws unless every receive has its send, in order, and ranks show that nothing waits in a circle.
  // `capacity`: boundary tensors that may wait on one edge in one direction.
  Actions(std::vector<std::vector<Action>> stages, int64_t capacity);

  const std::vector<Action>& of(int32_t stage) const { return stages_[stage]; }
  int32_t num_stages() const { return static_cast<int32_t>(stages_.size()); }
  int64_t capacity() const { return capacity_; }

 private:
  void check_edge(int32_t sender, ActionKind send, int32_t receiver, ActionKind receive) const;

  std::vector<std::vector<Action>> stages_;
  int64_t capacity_;
};

}  // namespace gpipe_fast
