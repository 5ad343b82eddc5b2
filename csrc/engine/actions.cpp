#include "engine/actions.h"

#include "check.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>
#include <utility>

namespace gpipe_fast {

std::string Action::name() const {
  static constexpr std::array<const char*, 10> kKinds = {"F",      "R",      "B",      "I",      "W",
                                                         "SEND_F", "RECV_F", "SEND_B", "RECV_B", "U"};
  return std::to_string(stage) + kKinds.at(static_cast<size_t>(kind)) + std::to_string(microbatch);
}

Actions::Actions(std::vector<std::vector<Action>> stages, int64_t num_slots, std::vector<int32_t> groups,
                 std::vector<bool> is_here, std::vector<Receive> receives)
    : stages_(std::move(stages)),
      num_slots_(num_slots),
      groups_(std::move(groups)),
      is_here_(std::move(is_here)),
      receives_(std::move(receives)) {
  GPIPE_CHECK_ARG(!stages_.empty(), "a pipeline must have at least one stage, got none");
  GPIPE_CHECK_ARG(num_slots > 0, "at least one slot is required, got ", num_slots);
  GPIPE_CHECK_ARG(is_here_.empty() || is_here_.size() == stages_.size(), "there are ", stages_.size(),
                  " stages, but places of ", is_here_.size());
  const int32_t last = num_stages() - 1;
  std::set<int64_t> ranks;
  for (int32_t stage = 0; stage <= last; ++stage) {
    int64_t rank = -1;
    for (const Action& action : stages_[stage]) {
      GPIPE_CHECK_ARG(action.stage == stage, action.name(), " is listed among the actions of stage ", stage);
      GPIPE_CHECK_ARG(action.rank > rank, action.name(), " has rank ", action.rank, ", which must exceed ",
                      rank);
      GPIPE_CHECK_ARG(ranks.insert(action.rank).second, action.name(),
                      " has the rank of another action: ", action.rank);
      rank = action.rank;
    }
  }
  for (int32_t stage = 0; stage <= last; ++stage) {
    check_connection(stage, ActionKind::send_forward, stage + 1, ActionKind::recv_forward);
    check_connection(stage, ActionKind::send_backward, stage - 1, ActionKind::recv_backward);
  }
  check_connection(-1, ActionKind::send_forward, 0, ActionKind::recv_forward);
  check_connection(last + 1, ActionKind::send_backward, last, ActionKind::recv_backward);
  assign_turns();
}

void Actions::assign_turns() {
  if (groups_.empty()) {
    groups_.resize(stages_.size());
    std::iota(groups_.begin(), groups_.end(), 0);
  }
  GPIPE_CHECK_ARG(groups_.size() == stages_.size(), "there are ", stages_.size(), " stages, but groups of ",
                  groups_.size());
  std::map<int32_t, std::map<int64_t, Action*>> by_group;  // by rank
  for (int32_t stage = 0; stage < num_stages(); ++stage) {
    GPIPE_CHECK_ARG(groups_[stage] >= 0 && groups_[stage] < num_stages(), "stage ", stage,
                    " cannot be in group ", groups_[stage]);
    if (std::count(groups_.begin(), groups_.end(), groups_[stage]) == 1) continue;
    for (Action& action : stages_[stage]) by_group[groups_[stage]][action.rank] = &action;
  }
  for (const auto& [group, actions] : by_group) {
    int64_t turn = 0;
    for (const auto& [rank, action] : actions) action->turn = turn++;
  }
}

void Actions::check_connection(int32_t sender, ActionKind send, int32_t receiver, ActionKind receive) const {
  const bool is_between_stages = std::min(sender, receiver) >= 0 && std::max(sender, receiver) < num_stages();
  if (is_between_stages && leaves_process(sender, receiver)) return;  // another process checks its receives
  auto select = [&](int32_t stage, ActionKind kind) {
    std::vector<Action> found;
    if (stage < 0 || stage >= num_stages()) return found;
    for (const Action& action : stages_[stage]) {
      if (action.kind == kind) found.push_back(action);
    }
    return found;
  };
  const auto sends = select(sender, send), receives = select(receiver, receive);
  GPIPE_CHECK_ARG(sends.size() == receives.size(), "stage ", sender, " sends ", sends.size(),
                  " tensors to stage ", receiver, ", which receives ", receives.size());
  for (size_t i = 0; i < sends.size(); ++i) {
    GPIPE_CHECK_ARG(sends[i].microbatch == receives[i].microbatch, receives[i].name(), " would receive from ",
                    sends[i].name(), ", but a connection keeps its order");
    GPIPE_CHECK_ARG(sends[i].rank < receives[i].rank, receives[i].name(), " ranks before ", sends[i].name());
    const size_t slots = static_cast<size_t>(num_slots_);
    GPIPE_CHECK_ARG(i < slots || receives[i - slots].rank < sends[i].rank, sends[i].name(),
                    " ranks before a slot is free: of ", num_slots_, " slots, the next one is freed by ",
                    receives[i < slots ? 0 : i - slots].name());
  }
}

}  // namespace gpipe_fast
