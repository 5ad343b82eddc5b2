// A ring of pinned blocks: copies bytes from one device to another through host memory. The copies to and
// from the host overlap:
//
//   sender's out stream    ─to 0─┬─to 1─┬─to 2─┬─ ...        fills a block once its previous use has finished
//   receiver's in stream         └from 0┴from 1┴from 2─      empties the block once it is filled
//
// The streams wait for stream events; the host never waits.
#pragma once

#include "device/copier.h"
#include "device/stream.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <mutex>

namespace gpipe_fast {

class PinnedRing {
 public:
  // A tensor is copied in pieces, each in a block. The copies that nothing overlaps (the first piece in, the last piece
  // out) are short relative to a large tensor, and the host's six calls for a piece are cheap relative to it.
  static constexpr int64_t kBlockBytes = int64_t{4} << 20;
  static constexpr int64_t kMinPieceBytes = int64_t{1} << 20;
  static constexpr int64_t kNumPieces = 8;  // of a tensor, within these limits
  static constexpr int kNumBlocks = 4;

  PinnedRing(const Copier& copier, Stream out, Stream in);
  ~PinnedRing();
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  // Enqueues the copy of `source`, bytes on the sender's device, to `target`, as many bytes on the receiver's device.
  // The copy begins after the work already on the out stream; it is complete for later work on the in stream.
  void enqueue_copies(const at::Tensor& source, const at::Tensor& target);

  // Frees all blocks by making the out stream wait for the in stream. Later copies then wait for no earlier stream
  // event, so a capture can contain them; at this call it must have begun on both streams or on neither.
  void begin();
  // Keeps the blocks' memory from being reused before `event`, by making the in stream wait for it.
  void keep_until(const StreamEvent& event) const { in_.wait(event); }

 private:
  const Copier& copier_;
  const Stream out_, in_;
  std::mutex mutex_;
  at::Tensor memory_;                              // of all blocks
  std::array<StreamEvent, kNumBlocks> last_uses_;  // by block: the end of its latest use
  int64_t num_uses_ = 0;                           // number of block uses since begin()
};

}  // namespace gpipe_fast
