#include "engine/disturbance.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

namespace gpipe_fast {
namespace {

// Raises the fault at the cancellation check with the number `fault->step`, if there is one.
class Failing final : public Watch {
 public:
  Failing(Watch& inner, const Fault* fault) : inner_(inner), fault_(fault) {}
  void look() override {
    inner_.look();
    if (fault_ != nullptr && looks_++ == fault_->step) fault_->raise();
  }
  void blame(const std::string& place) override { inner_.blame(place); }

 private:
  Watch& inner_;
  const Fault* fault_;
  int64_t looks_ = 0;
};

}  // namespace

void Disturbed::run(const Action& action, Watch& watch) {
  const Fault* fault = nullptr;
  for (const Fault& planted : disturbance_.faults) {
    if (planted.action == action.name()) fault = &planted;
  }
  delay(action, 0, watch);
  Failing failing(watch, fault);
  inner_.run(action, failing);
  if (fault != nullptr) fault->raise();
  delay(action, 1, watch);
}

void Disturbed::delay(const Action& action, uint64_t salt, Watch& watch) const {
  if (disturbance_.longest_delay_us == 0) return;
  std::mt19937_64 random(disturbance_.seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(action.rank) * 2 +
                         salt);
  // Most delays are short, because microseconds decide the order of two actions.
  const uint64_t longest = static_cast<uint64_t>(disturbance_.longest_delay_us) >> (random() % 8);
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(random() % (longest + 1));
  // Sleeps in short pieces, so that a cancelled action stops as promptly as one that runs operators.
  for (auto now = std::chrono::steady_clock::now(); now < end; now = std::chrono::steady_clock::now()) {
    watch.look();
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(end - now, std::chrono::milliseconds(1)));
  }
}

}  // namespace gpipe_fast
