// What stages synchronize through: slots, which are room for boundary tensors between two neighbouring stages; and the
// turns of stages that run one at a time.
//
// There is one object Slots for each connection and direction. The tensors are stored with the receiver; slots only
// count them:
//
//   sent 5, received 3, capacity 4:   two tensors wait, two more may be sent before the sender has to wait
#pragma once

#include "engine/waiter.h"

#include <atomic>
#include <cstdint>

namespace gpipe_fast {

// The rank from which on actions are cancelled. An action waits only for actions of lower rank.
class Cancellation {
 public:
  static constexpr int64_t kNothing = INT64_MAX;
  static constexpr int64_t kEverything = -1;

  bool covers(int64_t rank) const { return from_.load(std::memory_order_seq_cst) <= rank; }
  void reset() { from_.store(kNothing, std::memory_order_seq_cst); }
  // Only lowers the rank. Afterwards the caller must wake the waiting threads.
  void cancel_from(int64_t rank) {
    int64_t current = from_.load(std::memory_order_relaxed);
    while (rank < current && !from_.compare_exchange_weak(current, rank, std::memory_order_seq_cst)) {
    }
  }

 private:
  std::atomic<int64_t> from_{kNothing};
};

// The order in which the actions of a group of stages run.
class Turns {
 public:
  // Waits for a turn. Returns false if `cancellation` covered `rank` first.
  bool wait_for(int64_t turn, int64_t rank, const Cancellation& cancellation) {
    auto reached = [&] { return next_.load(std::memory_order_seq_cst) == turn; };
    waiter_.wait([&] { return reached() || cancellation.covers(rank); });
    return reached();
  }
  // Everything that the caller wrote before is visible to the action that has the next turn.
  void pass() {
    next_.fetch_add(1, std::memory_order_seq_cst);
    waiter_.wake();
  }

  void wake() { waiter_.wake(); }
  void reset() { next_.store(0, std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> next_{0};
  Waiter waiter_;
};

// First in, first out; one sender, one receiver.
class Slots {
 public:
  // Waits until a slot is free. Returns false if `cancellation` covered `rank` first.
  bool wait_for_room(int64_t capacity, int64_t rank, const Cancellation& cancellation) {
    const int64_t sent = sent_.load(std::memory_order_relaxed);
    auto room = [&] { return sent - received_.load(std::memory_order_seq_cst) < capacity; };
    waiter_.wait([&] { return room() || cancellation.covers(rank); });
    return room();
  }
  // Everything that the sender wrote before is visible to the receiver once wait_for_tensor() returns true.
  void send() {
    sent_.fetch_add(1, std::memory_order_seq_cst);
    waiter_.wake();
  }

  // Waits until a tensor was sent. Returns false if `cancellation` covered `rank` first.
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

  // Makes both sides check again, after a cancellation.
  void wake() { waiter_.wake(); }
  // Call only while no thread sends or receives.
  void reset() {
    sent_.store(0, std::memory_order_relaxed);
    received_.store(0, std::memory_order_relaxed);
  }

 private:
  // Each counter has its own cache line, because another thread writes it.
  alignas(64) std::atomic<int64_t> sent_{0};
  alignas(64) std::atomic<int64_t> received_{0};
  alignas(64) Waiter waiter_;
};

}  // namespace gpipe_fast
