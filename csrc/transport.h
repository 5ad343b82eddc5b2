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
// Between stages of one device a tensor is handed over as it is, and only waited for.
#pragma once

#include "stream.h"

#include <cstdint>
#include <vector>

namespace gpipe_fast {

// The way of a boundary tensor, or of a skip connection's.
enum class Way : uint8_t { forward, backward, skip };

class Transport {
 public:
  // The devices of the stages.
  explicit Transport(const std::vector<at::Device>& devices);

  const Stream& work(int32_t stage) const { return stages_[stage].work; }
  // All there are; the first is the first stage's, for its work.
  std::vector<Stream> streams() const;
  // Whether all stages run on the CPU: then all that follows does nothing.
  bool is_cpu() const { return is_cpu_; }

  // The calling thread's streams, one for each stage; none where all are the CPU's.
  std::vector<Stream> callers() const;
  // All stages' work from now on begins after what is on such streams; and the other way round.
  void enter(const std::vector<Stream>& callers) const;
  // After a run that failed nobody may have received what is on its way, and it may be the caller's own.
  void leave(const std::vector<Stream>& callers, bool failed) const;

  // For a tensor that stages have made, before callers use it on their streams.
  void hand_over(const at::Tensor& tensor, const std::vector<Stream>& callers) const;

  // Tensors on their way; called by the sender's worker, or, for a skip connection, by the receiver's. Brings them to
  // the receiver's device, strides and all, and returns when they are there; undefined ones stay. `made`: when.
  Moment send(std::vector<at::Tensor>& tensors, int32_t sender, const Moment& made, int32_t receiver,
              Way way) const;
  // A copy of a tensor that was put on one stream, for another, in whose order it is. For the calling thread.
  at::Tensor copy(const at::Tensor& tensor, const Stream& made, const Stream& used) const;
  // Before the receiver uses what was sent.
  void receive(int32_t receiver, const Moment& there) const;

 private:
  struct Stage {
    Stream work, out;
    std::vector<Stream> in;  // by way
  };
  std::vector<Stage> stages_;
  bool is_cpu_ = true;
};

}  // namespace gpipe_fast
