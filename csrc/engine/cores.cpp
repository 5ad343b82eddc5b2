#include "engine/cores.h"

#include <algorithm>
#include <tuple>

#ifdef __linux__
#include <sched.h>
#endif

namespace gpipe_fast {
namespace {

size_t max_threads_per_core(size_t num_threads, size_t num_cores) {
  return (num_threads + num_cores - 1) / num_cores;
}

bool is_spread(const std::vector<int>& current, size_t max_threads) {
  for (size_t i = 0; i < current.size(); ++i) {
    if (i > 0 && current[i] == current[i - 1]) return false;
    if (static_cast<size_t>(std::count(current.begin(), current.end(), current[i])) > max_threads)
      return false;
  }
  return true;
}

}  // namespace

std::vector<int> spread_threads(const std::vector<int>& current, const std::vector<int>& allowed) {
  if (allowed.size() < 2) return current;
  const size_t max_threads = max_threads_per_core(current.size(), allowed.size());
  std::vector<int> targets;
  for (int core : current) {
    const auto threads = [&](int c) {
      return static_cast<size_t>(std::count(targets.begin(), targets.end(), c));
    };
    const auto is_neighbours_core = [&](int c) { return !targets.empty() && targets.back() == c; };
    const bool usable = std::find(allowed.begin(), allowed.end(), core) != allowed.end();
    if (!usable || is_neighbours_core(core) || threads(core) >= max_threads) {
      core = *std::min_element(allowed.begin(), allowed.end(), [&](int a, int b) {
        return std::make_tuple(is_neighbours_core(a), threads(a)) <
               std::make_tuple(is_neighbours_core(b), threads(b));
      });
    }
    targets.push_back(core);
  }
  return targets;
}

#ifdef __linux__

Cores::Cores(int32_t num_threads) {
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return;  // more cores than a cpu_set_t holds
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &mask)) allowed_.push_back(core);
  }
  if (allowed_.size() > 1) current_.assign(num_threads, -1);
}

void Cores::plan_moves() {
  targets_.clear();
  if (current_.empty() || current_.front() < 0) return;
  if (!is_spread(current_, max_threads_per_core(current_.size(), allowed_.size())))
    targets_ = spread_threads(current_, allowed_);
}

void Cores::enter(int32_t thread) const {
  if (targets_.empty() || sched_getcpu() == targets_[thread]) return;
  cpu_set_t mask, one;
  CPU_ZERO(&one);
  CPU_SET(targets_[thread], &one);
  // The affinity mask may have been changed from outside since the constructor read it.
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0 || !CPU_ISSET(targets_[thread], &mask)) return;
  if (sched_setaffinity(0, sizeof(one), &one) == 0) sched_setaffinity(0, sizeof(mask), &mask);
}

void Cores::leave(int32_t thread) {
  if (!current_.empty()) current_[thread] = sched_getcpu();
}

#else

Cores::Cores(int32_t) {}
void Cores::plan_moves() {}
void Cores::enter(int32_t) const {}
void Cores::leave(int32_t) {}

#endif

}  // namespace gpipe_fast
