// Coalesced copies: how boundary tensors are packed into byte buffers for the copy to another device.
//
// A tensor is copied as its bytes from the first element to the last, gaps included, so that its strides are
// preserved. Small tensors are coalesced into one buffer:
//
//   sender      [ mask . ][ sizes . ][ scale . ]      each begins at a multiple of 512 bytes, the
//   receiver    one block of memory, and views        alignment of blocks from PyTorch's allocator
//
// One copy then replaces several, at the cost of one kernel on the sender that packs the buffer. The receiver
// needs no kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gpipe_fast {

// Returns a tensor's memory from the first element to the last as one dimension, as it is there: without the bits that
// conjugate or negate elements when they are read.
at::Tensor flat(const at::Tensor& tensor);
// Returns that memory as bytes, also of dtypes that NCCL does not know.
at::Tensor as_bytes(const at::Tensor& tensor);

struct CoalescedCopy {
  struct Part {
    size_t index;       // among the tensors passed to pack()
    at::Tensor tensor;  // on the sender's device
    int64_t offset;     // in the buffer, in bytes
  };
  at::Tensor bytes;  // the buffer: one-dimensional, on the sender's device
  std::vector<Part> parts;

  // Only tensors of at most `kMaxSmallBytes` are coalesced, and only if there are at least `kMinSmallTensors` of them.
  // The launch cost does not dominate the copy of a larger tensor, and the copies of one or two small tensors are as
  // fast as the kernel and the copy that would replace them.
  static constexpr int64_t kMaxSmallBytes = int64_t{256} << 10;
  static constexpr size_t kMinSmallTensors = 3;
  static constexpr int64_t kAlignment = 512;
};

// Packs all tensors that are defined and have elements; with `coalesce_small`, coalesces small ones. Sets
// `enqueued_work` if packing enqueued work on the calling thread's current stream of their device; otherwise
// leaves it unchanged.
std::vector<CoalescedCopy> pack(const std::vector<at::Tensor>& tensors, bool coalesce_small,
                                bool& enqueued_work);
// Replaces each packed tensor in `tensors` by a view of `arrived`: the buffer's copy on another device, or
// the memory into which that copy has been enqueued.
void unpack(const CoalescedCopy& buffer, const at::Tensor& arrived, std::vector<at::Tensor>& tensors);

}  // namespace gpipe_fast
