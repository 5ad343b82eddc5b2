// Transport: the streams of a pipeline's stages, and the copies of tensors from one stage to another.
//
// Each stage has a work stream, an out stream for copies from its device, and for each direction an in stream
// for copies to its device, so that computation and copies overlap:
//
//   stage 0, cuda:0    work   ──F0──┬──F1──────────       record a stream event, go on
//                      out          └─copy─┐              wait for it, copy
//   stage 1, cuda:1    in                  └┐             wait for the copy
//                      work                 └──F0──       wait for the in stream
//
// Between stages on one device a tensor is handed over without a copy; the receiver only waits for it.
// Between GPUs it is copied directly if they have peer access, else through a ring of pinned blocks.
#pragma once

#include "device/stream.h"
#include "transport/coalesced_copy.h"
#include "transport/pinned_ring.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace gpipe_fast {

// The direction of a boundary tensor: forward, backward, or along a skip connection.
enum class Direction : uint8_t { forward, backward, skip };

// How tensors are copied from one device to another.
enum class Route : uint8_t {
  hand_over,  // no copy: both stages are on one device
  peer,       // a direct copy between GPUs with peer access
  pinned,     // through a ring of pinned blocks
  copy,       // PyTorch's copy, between host and device
};
// The user's choice for copies between GPUs. `peer` and `pinned` force a copy even between stages on one device.
enum class TransportChoice : uint8_t { automatic, peer, pinned };

// Returns the route between two devices, which exchange tensors (see `Copier::peer_access`).
Route choose(at::Device sender, at::Device receiver, TransportChoice choice);
// Returns why that route is not `peer` although both devices report peer access, and the choice allows it; else "".
std::string peer_fault(at::Device sender, at::Device receiver, TransportChoice choice);

class Transport {
 public:
  // `devices`: by stage. `has_channels`: tensors also leave the process, so every stage has own streams for copies.
  explicit Transport(const std::vector<at::Device>& devices,
                     TransportChoice choice = TransportChoice::automatic, bool has_channels = false);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  const Stream& work(int32_t stage) const { return stages_[stage].work; }
  // The streams for copies from a stage's device, and to it.
  const Stream& out(int32_t stage) const { return stages_[stage].out; }
  const Stream& in(int32_t stage, Direction direction) const {
    return stages_[stage].in[static_cast<size_t>(direction)];
  }
  // Returns the streams of all stages; the first is the first stage's work stream.
  std::vector<Stream> streams() const;
  // Returns whether all stages run on the CPU. If so, there is nothing to synchronize.
  bool is_cpu() const { return is_cpu_; }

  // Returns the calling thread's current streams, one per stage; empty if all stages run on the CPU.
  std::vector<Stream> caller_streams() const;
  // Begins a run: every stage's later work waits for the work now on the caller's stream. Also frees all
  // blocks of the rings, so that the run waits for no earlier stream event except the callers'.
  void begin_run(const std::vector<Stream>& caller_streams) const;
  // Frees all blocks of all rings. Called at the start of a capture and after it, because captured work must
  // not wait for stream events outside the capture, nor the reverse. At the start of a capture, call it when all
  // streams belong to the capture.
  void free_blocks() const;
  // Ends a run: the callers' later work waits for the stages' work. After a failed run it also waits for the
  // out streams: tensors in flight may not have been received, and may be the caller's own.
  void end_run(const std::vector<Stream>& caller_streams, bool failed) const;
  // Call when an error was caught, before tensors are freed: see `survive_failure`.
  void survive_failures() const noexcept;
  void check_alive() const;

  // Records that callers will use, on their streams, a tensor that a stage computed (see `Stream::record_use`).
  void hand_over(const at::Tensor& tensor, const std::vector<Stream>& caller_streams) const;

  // Enqueues copies to the receiver's device, replaces `tensors` by the copies, which have the same strides,
  // and returns the stream event that completes them. Undefined tensors stay undefined; small boundary
  // tensors may share memory afterwards. `ready`: the stream event after which `tensors` can be read. Called
  // by the sender's worker; for a skip connection, by the receiver's.
  StreamEvent send(std::vector<at::Tensor>& tensors, int32_t sender, const StreamEvent& ready,
                   int32_t receiver, Direction direction) const;
  // Returns a copy of a tensor that was computed on the stream `producer`, for later work on the stream `consumer`,
  // which waits for the copy. Called by the thread that runs a mini-batch, not by workers.
  at::Tensor copy(const at::Tensor& tensor, const Stream& producer, const Stream& consumer) const;
  // Makes the receiver's later work wait for the stream event that send() returned.
  void receive(int32_t receiver, const StreamEvent& copy_done) const;

 private:
  struct StageStreams {
    Stream work;
    // The streams for copies. If the stage makes none, they are the work stream.
    Stream out;
    std::vector<Stream> in;  // by direction
  };
  // A connection from one stage to another. Without a direction it is for copy(), which may be called at any time.
  struct Connection {
    int32_t sender, receiver;
    std::optional<Direction> direction;
    bool operator<(const Connection& other) const {
      return std::tie(sender, receiver, direction) < std::tie(other.sender, other.receiver, other.direction);
    }
  };
  StreamEvent enqueue_copies_or_survive(const std::vector<CoalescedCopy>& packed,
                                        std::vector<at::Tensor>& tensors, const Connection& connection,
                                        const Stream& consumer) const;
  StreamEvent enqueue_copies(const std::vector<CoalescedCopy>& packed, std::vector<at::Tensor>& tensors,
                             std::vector<at::Tensor>& arrived, const Connection& connection,
                             const Stream& consumer) const;
  PinnedRing& ring(const Connection& connection, const Stream& out, const Stream& in) const;
  Route route(int32_t sender, int32_t receiver) const {
    return choose(work(sender).device(), work(receiver).device(), choice_);
  }

  const TransportChoice choice_;
  std::vector<StageStreams> stages_;
  std::vector<at::Device> devices_;  // of the stages, each once
  bool is_cpu_ = true;
  mutable std::mutex mutex_;
  mutable std::map<Connection, std::unique_ptr<PinnedRing>> rings_;  // created on first use
};

}  // namespace gpipe_fast
