// Actions: the ordered steps of every stage, as plain data. The schedules in gpipe_fast/schedule/ generate them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gpipe_fast {

enum class ActionKind : uint8_t {
  forward,
  recompute,         // the part of a backward that needs no boundary gradient
  backward,          // the whole backward, or the rest after a recompute
  backward_inputs,   // computes the boundary gradient for the previous stage
  backward_weights,  // the rest after backward_inputs
  send_forward,      // boundary activation to the next stage
  recv_forward,
  send_backward,  // boundary gradient to the previous stage
  recv_backward,
};

struct Action {
  ActionKind kind;
  int32_t stage;
  int32_t microbatch;
  // Position in schedule order: unique, and higher than the rank of every action that this one waits for.
  int64_t rank;
  // Position among the actions of its group; -1 if its stage is alone in it. See Actions.
  int64_t turn = -1;

  // Returns the name in the notation of torch.distributed.pipelining: 2F0 is stage 2, forward, micro-batch 0.
  std::string name() const;
};

// What one SEND of a stage in another process sends to a stage here.
struct Receive {
  int64_t rank;  // of the SEND
  ActionKind kind;
  int32_t sender, receiver;
  int32_t microbatch;
};

// The actions of every stage. The constructor validates them.
class Actions {
 public:
  // Throws std::invalid_argument unless sends and receives match in order and the ranks rule out a deadlock.
  // `num_slots`: how many boundary tensors may be in flight between two stages in one direction.
  // `groups`: the group of each stage, below the number of stages; empty if each stage is alone. The actions of a group
  // run one at a time, in the order of their ranks.
  // `is_here`: whether each stage is in this process; empty if all are. A stage in another process has only its sends to
  // stages here: its worker here receives the tensors. No stage here receives what is sent to another process.
  // `receives`: if the stages here receive the tensors themselves, all that they receive, in the order of the ranks.
  Actions(std::vector<std::vector<Action>> stages, int64_t num_slots, std::vector<int32_t> groups = {},
          std::vector<bool> is_here = {}, std::vector<Receive> receives = {});

  const std::vector<Action>& of(int32_t stage) const { return stages_[stage]; }
  int32_t num_stages() const { return static_cast<int32_t>(stages_.size()); }
  int64_t num_slots() const { return num_slots_; }
  int32_t group(int32_t stage) const { return groups_[stage]; }
  const std::vector<Receive>& receives() const { return receives_; }
  // Returns whether the action sends to another process. It has no slots.
  bool leaves_process(const Action& action) const {
    if (action.kind == ActionKind::send_forward) return leaves_process(action.stage, action.stage + 1);
    return action.kind == ActionKind::send_backward && leaves_process(action.stage, action.stage - 1);
  }

 private:
  bool leaves_process(int32_t sender, int32_t receiver) const {
    return !is_here_.empty() && is_here_.at(sender) && !is_here_.at(receiver);
  }
  void assign_turns();
  void check_connection(int32_t sender, ActionKind send, int32_t receiver, ActionKind receive) const;

  std::vector<std::vector<Action>> stages_;
  int64_t num_slots_;
  std::vector<int32_t> groups_;
  std::vector<bool> is_here_;
  std::vector<Receive> receives_;
};

}  // namespace gpipe_fast
