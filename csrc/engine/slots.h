// Slots: where boundary tensors wait; all that two neighbouring stages share, and the only place they synchronise.
//
// One for each edge and direction. The tensors lie with the receiver; slots only count them:
//
//   sent 5, received 3, capacity 4:   two tensors wait, two more may be sent before the sender has to wait
#pragma once

#include "engine/waiter.h"

#include <atomic>
#include <cstdint>

namespace gpipe_fast {

// The rank from which on no action runs any more. Whatever an action waits for has a lower rank than itself.
class Cancellation {
 public:
  static constexpr int64_t kNothing = INT64_MAX;
  static constexpr int64_t kEverything = -1;

  bool covers(int64_t rank) const { return from_.load(std::memory_order_seq_cst) <= rank; }
  void reset() { from_.store(kNothing, std::memory_order_seq_cst); }
  // Only ever lowers it. Threads that wait must be woken after it.
  void cancel_from(int64_t rank) {
    int64_t current = from_.load(std::memory_order_relaxed);
    while (rank < current && !from_.compare_exchange_weak(current, rank, std::memory_order_seq_cst)) {
    }
  }

 private:
  std::atomic<int64_t> from_{kNothing};
};

// First in, first out; one sender, one receiver.
class Slots {
 public:
  // Until a slot is free. False if `cancellation` came to cover `rank` first.
  bool wait_for_room(int64_t capacity, int64_t rank, const Cancellation& cancellation) {
    const int64_t sent = sent_.load(std::memory_order_relaxed);
    auto room = [&] { return sent - received_.load(std::memory_order_seq_cst) < capacity; };
    waiter_.wait([&] { return room() || cancellation.covers(rank); });
    return room();
  }
  // What the sender wrote before is visible to the receiver once its wait returns true.
  void send() {
    sent_.fetch_add(1, std::memory_order_seq_cst);
    waiter_.wake();
  }

  // Until a tensor is there. False if `cancellation` came to cover `rank` first.
  bool wait_for_tensor(int64_t rank, const Cancellation& cancellation) {
    const int64_t received = received_.load(std::memory_order_relaxed);
    auto arrived = [&] { return sent_.load(std::memory_order_seq_cst) > received; };
    waiter_.wait([&] { return arrived() || cancellation.covers(rank); });
    return arrived();
  }
  void receive() {
    received_.fetch_add(1, std::memory_order_seq_cst);
    waiter_.wake();
  }

  // Both sides look again, after a cancellation.
  void wake() { waiter_.wake(); }
  // Only while nobody uses it.
  void reset() {
    sent_.store(0, std::memory_order_relaxed);
    received_.store(0, std::memory_order_relaxed);
  }

 private:
  // On cache lines of their own: each is written by one of the two threads.
  alignas(64) std::atomic<int64_t> sent_{0};
  alignas(64) std::atomic<int64_t> received_{0};
  alignas(64) Waiter waiter_;
};

}  // namespace gpipe_fast
