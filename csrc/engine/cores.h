// CPU placement: the cores on which the threads of a pool run.
#pragma once

#include <cstdint>
#include <vector>

namespace gpipe_fast {

// Returns one core per thread, given the cores `current` on which the threads run and the cores that they are
// `allowed` to use: neighbouring threads get different cores, and no core gets more threads than necessary. A
// thread whose core satisfies this stays there. With a single allowed core, all threads stay.
std::vector<int> spread_threads(const std::vector<int>& current, const std::vector<int>& allowed);

// Keeps threads that hand work to each other on different cores. Linux wakes a thread on its previous core
// and rebalances only every few milliseconds. Until then, many short runs pass in which threads wait for one
// core while another is idle.
//
// A thread is migrated by narrowing its affinity mask, which is restored at once. Has no effect except on Linux.
class Cores {
 public:
  // For threads that the calling thread will start: they inherit its affinity mask.
  explicit Cores(int32_t num_threads);

  // Decides which threads to migrate. Called by the thread that starts a run, while no other thread calls this object.
  void plan_moves();
  // Called by each thread when its part of a run begins (migrates the thread if necessary) and ends.
  void enter(int32_t thread) const;
  void leave(int32_t thread);

 private:
  std::vector<int> allowed_;
  std::vector<int> current_;  // by thread: the core at its latest leave(); negative before its first run
  std::vector<int> targets_;  // by thread: the target core; empty if no thread has to move
};

}  // namespace gpipe_fast
