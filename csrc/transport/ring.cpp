#include "transport/ring.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace gpipe_fast {

Ring::Ring(const Copier& copier, Stream out, Stream in)
    : copier_(copier), out_(std::move(out)), in_(std::move(in)) {
  memory_ = at::empty({kNumBlocks * kBlockBytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  for (const Stream* stream : {&out_, &in_}) {
    const Stream::Current current(*stream);
    copier_.keep_for_stream(memory_, stream->device());
  }
}

void Ring::carry(const at::Tensor& source, const at::Tensor& target) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t begin = 0; begin < source.numel(); begin += kBlockBytes) {
    const int64_t bytes = std::min(kBlockBytes, source.numel() - begin);
    const int64_t block = used_++ % kNumBlocks;
    const at::Tensor pinned = memory_.narrow(0, block * kBlockBytes, bytes);
    out_.wait(emptied_[block]);
    {
      const Stream::Current current(out_);
      copier_.copy(pinned, source.narrow(0, begin, bytes), out_.device());
    }
    in_.wait(Moment(out_));
    {
      const Stream::Current current(in_);
      copier_.copy(target.narrow(0, begin, bytes), pinned, in_.device());
    }
    emptied_[block] = Moment(in_);
  }
}

void Ring::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (used_ == 0) return;
  out_.wait(Moment(in_));
  emptied_.fill(Moment());
  used_ = 0;
}

}  // namespace gpipe_fast
