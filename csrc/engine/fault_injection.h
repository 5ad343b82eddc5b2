// Fault injection: delays and failures with which tests show that a pipeline is correct under any timing and any error.
#pragma once

#include "engine/engine.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gpipe_fast {

struct Fault {
  std::string action;           // an Action::name()
  int64_t fail_at_step;         // program steps to run before failing; past the last step, fails at the end
  std::function<void()> raise;  // throws
};

struct FaultInjection {
  uint64_t seed = 0;
  int64_t max_delay_us = 0;  // before and after every action, thus also before a send or receive ends
  std::vector<Fault> faults;

  bool empty() const { return max_delay_us == 0 && faults.empty(); }
};

// Runs the inner work with injected delays and failures.
class FaultInjectingWork final : public Work {
 public:
  FaultInjectingWork(Work& inner, const FaultInjection& fault_injection)
      : inner_(inner), fault_injection_(fault_injection) {}
  void enter_stage(int32_t stage, const std::function<void()>& run_actions) override {
    inner_.enter_stage(stage, run_actions);
  }
  void run(const Action& action, CancellationToken& token) override;
  Observed observe(const Action& action) const override { return inner_.observe(action); }
  int64_t cancelled_by(int64_t rank) const override { return inner_.cancelled_by(rank); }
  void cancel_from(int64_t rank) override { inner_.cancel_from(rank); }

 private:
  void delay(const Action& action, uint64_t salt, CancellationToken& token) const;

  Work& inner_;
  const FaultInjection& fault_injection_;
};

}  // namespace gpipe_fast
