// Waiting until another thread makes a condition true: looks for a while, then sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace gpipe_fast {

// Whoever makes the condition true stores what it reads with seq_cst order, then calls wake(): a waiter either sees
// the new state or is seen by wake().
class Waiter {
 public:
  template <class Condition>
  void wait(const Condition& condition) {
    for (int i = 0; i < kLooks; ++i) {
      if (condition()) return;
      std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    changed_.wait(lock, condition);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

  // Sleeps at once, and gives up after a time. Returns the condition.
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
    // A sleeper that has read the old state is inside wait() once the mutex can be had.
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }
    changed_.notify_all();
  }

 private:
  // So many looks take about as long as falling asleep and being woken, some 40 µs. The core is given away
  // between them, since the thread that is waited for may need it: stages can outnumber cores.
  static constexpr int kLooks = 100;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> sleepers_{0};
};

}  // namespace gpipe_fast
