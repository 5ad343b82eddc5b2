// Waits until another thread makes a condition true: spins for a while, then sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace gpipe_fast {

// The thread that makes the condition true stores the state that the condition reads with seq_cst order, then
// calls wake(). Either the waiter sees the new state, or wake() sees the waiter.
class Waiter {
 public:
  template <class Condition>
  void wait(const Condition& condition) {
    for (int i = 0; i < kSpins; ++i) {
      if (condition()) return;
      std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    changed_.wait(lock, condition);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

  // Sleeps without spinning, for at most `duration`. Returns whether the condition holds.
  template <class Condition, class Duration>
  bool wait_for(const Condition& condition, Duration duration) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const bool held = changed_.wait_for(lock, duration, condition);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return held;
  }

  void wake() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    // Once this thread has had the mutex, every sleeper that read the old state is blocked in changed_.wait().
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }
    changed_.notify_all();
  }

 private:
  // Number of spins: they take about as long as falling asleep and being woken, some 40 µs. The waiter yields
  // its core between them because the other thread may need it: stages can outnumber cores.
  static constexpr int kSpins = 100;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> sleepers_{0};
};

}  // namespace gpipe_fast
