// A ring of pinned blocks, through which bytes go from one device to another by way of the host, both halves at once:
//
//   sender's out stream    ─to 0─┬─to 1─┬─to 2─┬─ ...        a block is filled when its last use is done
//   receiver's in stream         └from 0┴from 1┴from 2─      and emptied once it is filled
//
// Streams wait for events, the host for nothing.
#pragma once

#include "device/copier.h"
#include "device/stream.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <mutex>

namespace gpipe_fast {

class Ring {
 public:
  // Blocks this large keep what nothing overlaps, the first half of the first and the second of the last, short beside
  // a large tensor, and what an event costs small beside a block.
  static constexpr int64_t kBlockBytes = int64_t{1} << 20;
  static constexpr int kNumBlocks = 8;

  Ring(const Copier& copier, Stream out, Stream in);
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Bytes on the sender's device, from what is on its stream on, to as many on the receiver's, in the order of its.
  void carry(const at::Tensor& source, const at::Tensor& target);

  // All blocks are free from now on: the one stream begins after what is on the other. So nothing is waited for that was
  // before, and what follows can be captured by itself, in a capture that has begun on both streams, or on none yet.
  void begin();
  // What is done with the blocks comes, on the receiver's stream, before this.
  void keep_until(const Moment& moment) const { in_.wait(moment); }

 private:
  const Copier& copier_;
  const Stream out_, in_;
  std::mutex mutex_;
  at::Tensor memory_;  // all blocks
  std::array<Moment, kNumBlocks> emptied_;
  int64_t used_ = 0;  // blocks since the begin, counted anew whenever they come round
};

}  // namespace gpipe_fast
