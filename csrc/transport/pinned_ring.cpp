#include "transport/pinned_ring.h"

#include "device/failure.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace gpipe_fast {

PinnedRing::PinnedRing(const Copier& copier, Stream out, Stream in)
    : copier_(copier), out_(std::move(out)), in_(std::move(in)) {
  memory_ = at::empty({kNumBlocks * kBlockBytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  note_shared(memory_);
  for (const Stream* stream : {&out_, &in_}) {
    const Stream::Guard current(*stream);
    copier_.record_stream(memory_, stream->device());
  }
}

PinnedRing::~PinnedRing() {
  std::vector<at::Tensor> memory{std::move(memory_)};
  free_shared(memory);
}

void PinnedRing::enqueue_copies(const at::Tensor& source, const at::Tensor& target) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t piece = std::clamp(source.numel() / kNumPieces, kMinPieceBytes, kBlockBytes);
  for (int64_t begin = 0; begin < source.numel(); begin += piece) {
    const int64_t bytes = std::min(piece, source.numel() - begin);
    const int64_t block = num_uses_++ % kNumBlocks;
    const at::Tensor pinned = memory_.narrow(0, block * kBlockBytes, bytes);
    out_.wait(last_uses_[block]);
    {
      const Stream::Guard current(out_);
      copier_.copy(pinned, source.narrow(0, begin, bytes), out_.device());
    }
    in_.wait(StreamEvent(out_));
    {
      const Stream::Guard current(in_);
      copier_.copy(target.narrow(0, begin, bytes), pinned, in_.device());
    }
    last_uses_[block] = StreamEvent(in_);
  }
}

void PinnedRing::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_uses_ == 0) return;
  out_.wait(StreamEvent(in_));
  last_uses_.fill(StreamEvent());
  num_uses_ = 0;
}

}  // namespace gpipe_fast
