// Delays and failures planted in a pipeline, so that tests can show that no timing and no error does harm.
#pragma once

#include "engine/engine.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gpipe_fast {

struct Fault {
  std::string action;           // as Action::name() has it
  int64_t step;                 // how many steps of its program go before; with fewer it fails at its end
  std::function<void()> raise;  // throws
};

struct Disturbance {
  uint64_t seed = 0;
  int64_t longest_delay_us = 0;  // before and after every action, so before a slot is given on too
  std::vector<Fault> faults;
};

// The inner work, disturbed.
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
