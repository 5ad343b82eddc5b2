#include "engine/cores.h"

#include <algorithm>
#include <tuple>

#ifdef __linux__
#include <sched.h>
#endif

namespace gpipe_fast {
namespace {

size_t most_on_a_core(size_t num_threads, size_t num_cores) {
  return (num_threads + num_cores - 1) / num_cores;
}

bool apart(const std::vector<int>& now, size_t most) {
  for (size_t i = 0; i < now.size(); ++i) {
    if (i > 0 && now[i] == now[i - 1]) return false;
    if (static_cast<size_t>(std::count(now.begin(), now.end(), now[i])) > most) return false;
  }
  return true;
}

}  // namespace

std::vector<int> spread(const std::vector<int>& now, const std::vector<int>& allowed) {
  if (allowed.size() < 2) return now;
  const size_t most = most_on_a_core(now.size(), allowed.size());
  std::vector<int> placed;
  for (int core : now) {
    const auto threads = [&](int c) {
      return static_cast<size_t>(std::count(placed.begin(), placed.end(), c));
    };
    const auto beside_neighbour = [&](int c) { return !placed.empty() && placed.back() == c; };
    const bool usable = std::find(allowed.begin(), allowed.end(), core) != allowed.end();
    if (!usable || beside_neighbour(core) || threads(core) >= most) {
      core = *std::min_element(allowed.begin(), allowed.end(), [&](int a, int b) {
        return std::make_tuple(beside_neighbour(a), threads(a)) <
               std::make_tuple(beside_neighbour(b), threads(b));
      });
    }
    placed.push_back(core);
  }
  return placed;
}

#ifdef __linux__

Cores::Cores(int32_t num_threads) {
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return;  // more cores than a cpu_set_t holds
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &mask)) allowed_.push_back(core);
  }
  if (allowed_.size() > 1) now_.assign(num_threads, -1);
}

void Cores::arrange() {
  wanted_.clear();
  if (now_.empty() || now_.front() < 0) return;
  if (!apart(now_, most_on_a_core(now_.size(), allowed_.size()))) wanted_ = spread(now_, allowed_);
}

void Cores::enter(int32_t thread) const {
  if (wanted_.empty() || sched_getcpu() == wanted_[thread]) return;
  cpu_set_t mask, one;
  CPU_ZERO(&one);
  CPU_SET(wanted_[thread], &one);
  // The affinity mask may have been changed from outside since the constructor read it.
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0 || !CPU_ISSET(wanted_[thread], &mask)) return;
  if (sched_setaffinity(0, sizeof(one), &one) == 0) sched_setaffinity(0, sizeof(mask), &mask);
}

void Cores::leave(int32_t thread) {
  if (!now_.empty()) now_[thread] = sched_getcpu();
}

#else

Cores::Cores(int32_t) {}
void Cores::arrange() {}
void Cores::enter(int32_t) const {}
void Cores::leave(int32_t) {}

#endif

}  // namespace gpipe_fast
