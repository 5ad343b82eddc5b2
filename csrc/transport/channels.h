// Channels: how boundary tensors reach the stages of other processes.
//
// Each pair of stages that exchange tensors has one channel for each direction, so that a receive that waits never
// delays the tensors of another channel. A channel keeps its order, and knows no sizes: both ends know the layout of
// every tensor from the plan. A tensor on a GPU is sent or received in the order of the calling thread's current stream:
// what is enqueued there before a send has computed the tensor, and what is enqueued there after a wait may read it.
//
//   process of stage 0                        process of stage 1
//   0SEND_F0   send(x0) ──────────────────▶   receive(x0), begun by the worker of stage 0 here, ahead of 1RECV_F0
//   0SEND_F1   send(x1) ─ ─ ─ ─ ─ ─ ─ ─ ─ ▶   begun as soon as x0 has arrived and a slot is free
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

namespace gpipe_fast {

// The rank of waits that follow the last action. Any cancellation covers it.
constexpr int64_t kAfterAllActions = INT64_MAX - 1;

// Thrown by a wait that abort_from() has ended.
struct Aborted : std::exception {
  const char* what() const noexcept override { return "aborted"; }
};

// Thread safe; each channel has one thread that sends.
class Channels {
 public:
  virtual ~Channels() = default;

  // Returns whether a stage is in this process.
  virtual bool has(int32_t stage) const = 0;
  // Call before a run, when no thread waits.
  virtual void begin_run() = 0;
  // Returns whether transfers are ordered by streams alone, so that no call here waits for another process. All
  // processes then begin the transfers of all channels in one order.
  virtual bool is_on_device() const = 0;
  // Starts to send the memory from a tensor's first element to its last. Keeps the tensor until it is sent, unless it is
  // on a GPU and was copied to the host: the current stream then uses it. Waits while too many are being sent. `rank`:
  // that of the action that waits.
  virtual void send(const at::Tensor& tensor, int32_t sender, int32_t receiver, int64_t rank) = 0;
  // Waits until everything is sent; on a device, makes the current stream wait. Throws Aborted after a cancellation.
  virtual void flush() = 0;

  class Arrival {
   public:
    virtual ~Arrival() = default;
    // Waits until the tensor has arrived; on a GPU, until later work on the current stream finds it there. Call once.
    virtual void wait(int64_t rank) = 0;
  };
  // Starts to receive a tensor into its memory, which the caller keeps until it has arrived.
  virtual std::shared_ptr<Arrival> receive(const at::Tensor& tensor, int32_t sender, int32_t receiver) = 0;

  // The number of processes with this stage, each of which runs it for other samples; and which of them this one is.
  virtual int32_t num_replicas() const = 0;
  virtual int32_t replica() const = 0;
  // Starts to sum a contiguous tensor over the replicas, in place, and keeps it until then. All replicas make the same
  // calls in the same order. The order of additions depends on the size and position alone, and all get the same bits.
  virtual std::shared_ptr<Arrival> sum_replicas(const at::Tensor& tensor, int64_t rank) = 0;
  // As sum_replicas(), but each replica gets one row of the sum, of its number, in `own`: through the host, added up in
  // their order.
  virtual std::shared_ptr<Arrival> sum_rows(const at::Tensor& all, const at::Tensor& own, int64_t rank) = 0;

  // Ends the waits of actions of this rank and higher ones, from now on until begin_run(); they throw Aborted. On a
  // device, abandons the channels. Any thread may call it.
  virtual void abort_from(int64_t rank) = 0;
  // Call after a failed run: ends the transfers for which devices wait. The channels cannot be used any more.
  virtual void abandon() noexcept = 0;
  // Adds what else ends then: the collectives of layers, by groups of their own. Call before a run.
  virtual void abandon_too(std::function<void()> /*abort*/) {}
};

}  // namespace gpipe_fast
