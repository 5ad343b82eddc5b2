// Fault injection: delays and failures with which tests show that a pipeline is correct under any timing and
// any error.
#pragma once

#include "engine/engine.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gpipe_fast {

struct Fault {
  std::string action;           // an Action::name()
  int64_t step;                 // program steps to run before failing; past the last step, fails at the end
  std::function<void()> raise;  // throws
};

struct Disturbance {
  uint64_t seed = 0;
  int64_t longest_delay_us = 0;  // before and after every action, thus also before a slot is passed on
  std::vector<Fault> faults;
};

// Runs the inner work with injected delays and failures.
class Disturbed final : public Work {
 public:
  Disturbed(Work& inner, const Disturbance& disturbance) : inner_(inner), disturbance_(disturbance) {}
  void enter(int32_t stage, const std::function<void()>& walk) override { inner_.enter(stage, walk); }
  void run(const Action& action, Watch& watch) override;

 private:
  void delay(const Action& action, uint64_t salt, Watch& watch) const;

  Work& inner_;
  const Disturbance& disturbance_;
};

}  // namespace gpipe_fast
