#include "engine/fault_injection.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

namespace gpipe_fast {
namespace {

// Raises the fault at the cancellation check with the number `fault->fail_at_step`, if there is one.
class FaultInjectingToken final : public CancellationToken {
 public:
  FaultInjectingToken(CancellationToken& inner, const Fault* fault) : inner_(inner), fault_(fault) {}
  void check() override {
    inner_.check();
    if (fault_ != nullptr && num_checks_++ == fault_->fail_at_step) fault_->raise();
  }
  void set_layer_title(const std::string& layer_title) override { inner_.set_layer_title(layer_title); }

 private:
  CancellationToken& inner_;
  const Fault* fault_;
  int64_t num_checks_ = 0;
};

}  // namespace

void FaultInjectingWork::run(const Action& action, CancellationToken& token) {
  const Fault* fault = nullptr;
  for (const Fault& candidate : fault_injection_.faults) {
    if (candidate.action == action.name()) fault = &candidate;
  }
  delay(action, 0, token);
  FaultInjectingToken fault_token(token, fault);
  inner_.run(action, fault_token);
  if (fault != nullptr) fault->raise();
  delay(action, 1, token);
}

void FaultInjectingWork::delay(const Action& action, uint64_t salt, CancellationToken& token) const {
  if (fault_injection_.max_delay_us == 0) return;
  std::mt19937_64 random(fault_injection_.seed * 0x9e3779b97f4a7c15u +
                         static_cast<uint64_t>(action.rank) * 2 + salt);
  // Most delays are short, because microseconds decide the order of two actions.
  const uint64_t max_delay = static_cast<uint64_t>(fault_injection_.max_delay_us) >> (random() % 8);
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(random() % (max_delay + 1));
  // Sleeps in short pieces, so that a cancelled action stops as promptly as one that runs operators.
  for (auto now = std::chrono::steady_clock::now(); now < end; now = std::chrono::steady_clock::now()) {
    token.check();
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(end - now, std::chrono::milliseconds(1)));
  }
}

}  // namespace gpipe_fast
