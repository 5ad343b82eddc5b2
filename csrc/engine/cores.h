// Which cores the threads of a pool run on.
#pragma once

#include <cstdint>
#include <vector>

namespace gpipe_fast {

// Where threads should run that run on the cores `now`, given those they may use: no two neighbours on one core, and none
// that has more of them than it must. Who is well placed stays; with one core, all.
std::vector<int> spread(const std::vector<int>& now, const std::vector<int>& allowed);

// Keeps threads apart that hand work to each other. Left to itself, a thread that wakes stays on the core it was on, and
// the kernel looks for a better one only every few milliseconds: many short runs later, in which threads wait for a core
// while another has nothing to do.
//
// A thread is moved, and may then run wherever it might before. Does nothing but on Linux.
class Cores {
 public:
  // Of threads that the calling one will start, and that may use the cores which it may use.
  explicit Cores(int32_t num_threads);

  // By the thread that starts a run, while no other is in here.
  void arrange();
  // By each thread when its part of a run begins, and when it ends.
  void enter(int32_t thread) const;
  void leave(int32_t thread);

 private:
  std::vector<int> allowed_;
  std::vector<int> now_;     // by thread, where it was last; below 0 before its first run
  std::vector<int> wanted_;  // by thread; empty if all may stay
};

}  // namespace gpipe_fast
