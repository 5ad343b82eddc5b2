// Transport: the streams of a pipeline's stages, and how tensors get from one stage to another.
//
// Each stage has a stream for its work, and for each direction one on which arrives what is copied to its device;
// copies out of a device are made on a stream of the sender's, so that a device computes and copies at once:
//
//   stage 0, cuda:0    work   ──F0──┬──F1──────────       record a moment, go on
//                      out          └─copy─┐              wait for it, copy
//   stage 1, cuda:1    in                  └┐             wait for the copy
//                      work                 └──F0──       wait for what came in
//
// Between stages of one device a tensor is handed over as it is, and only waited for. Between GPUs it goes from one's
// memory to the other's where they reach each other, else through a ring of pinned blocks.
#pragma once

#include "device/stream.h"
#include "transport/parcel.h"
#include "transport/ring.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

namespace gpipe_fast {

// The way of a boundary tensor, or of a skip connection's.
enum class Way : uint8_t { forward, backward, skip };

// How tensors get from one device to another.
enum class Route : uint8_t {
  hand_over,
  peer,    // a copy between GPUs that reach each other
  pinned,  // through a ring of pinned blocks
  copy,    // as torch makes it, between host and device
};
// What is asked for between GPUs: peer and pinned even on one device.
enum class Choice : uint8_t { automatic, peer, pinned };

// Nothing where peers are asked for, and the devices do not reach each other.
std::optional<Route> choose(at::Device sender, at::Device receiver, Choice choice);

class Transport {
 public:
  // The devices of the stages. Throws if peers are asked for and neighbours do not reach each other.
  explicit Transport(const std::vector<at::Device>& devices, Choice choice = Choice::automatic);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  const Stream& work(int32_t stage) const { return stages_[stage].work; }
  // All there are; the first is the first stage's, for its work.
  std::vector<Stream> streams() const;
  // Whether all stages run on the CPU: then all that follows does nothing.
  bool is_cpu() const { return is_cpu_; }

  // The calling thread's streams, one for each stage; none where all are the CPU's.
  std::vector<Stream> callers() const;
  // All stages' work from now on begins after what is on such streams; and the other way round. For what runs between
  // the two, all blocks are free: it waits for no moment of before, but those of the callers.
  void enter(const std::vector<Stream>& callers) const;
  // Of all rings, in a run that is captured, and after it: what is captured waits for nothing outside, and the other way
  // round. All streams have joined before.
  void free_blocks() const;
  // After a run that failed nobody may have received what is on its way, and it may be the caller's own.
  void leave(const std::vector<Stream>& callers, bool failed) const;

  // For a tensor that stages have made, before callers use it on their streams.
  void hand_over(const at::Tensor& tensor, const std::vector<Stream>& callers) const;

  // Tensors on their way; called by the sender's worker, or, for a skip connection, by the receiver's. Brings them to
  // the receiver's device, strides and all, and returns when they are there; undefined ones stay. `made`: when. Of a
  // boundary, small ones may come to share memory.
  Moment send(std::vector<at::Tensor>& tensors, int32_t sender, const Moment& made, int32_t receiver,
              Way way) const;
  // A copy of a tensor that was put on one stream, for another, in whose order it is. For the calling thread.
  at::Tensor copy(const at::Tensor& tensor, const Stream& made, const Stream& used) const;
  // Before the receiver uses what was sent.
  void receive(int32_t receiver, const Moment& there) const;

 private:
  struct Stage {
    Stream work;
    // For copies, where there are some to make; else the same one.
    Stream out;
    std::vector<Stream> in;  // by way
  };
  // From one stage to another. Without a way of the run's: copies for callers, which may come at any time.
  struct Edge {
    int32_t sender, receiver;
    std::optional<Way> way;
    bool operator<(const Edge& other) const {
      return std::tie(sender, receiver, way) < std::tie(other.sender, other.receiver, other.way);
    }
  };
  Moment carry(const std::vector<Parcel>& parcels, std::vector<at::Tensor>& tensors, const Edge& edge,
               const Stream& used) const;
  Ring& ring(const Edge& edge, const Stream& out, const Stream& in) const;
  Route route(int32_t sender, int32_t receiver) const { return routes_[sender * stages_.size() + receiver]; }

  std::vector<Stage> stages_;
  std::vector<Route> routes_;  // by sender, then receiver
  bool is_cpu_ = true;
  mutable std::mutex mutex_;
  mutable std::map<Edge, std::unique_ptr<Ring>> rings_;  // made when first needed
};

}  // namespace gpipe_fast
