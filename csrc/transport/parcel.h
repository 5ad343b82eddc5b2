// Parcels: as what the tensors of a boundary go to another device.
//
// A tensor goes as its bytes from the first element to the last, gaps included, so that its strides stay. Small ones go
// as one, one behind the other:
//
//   parcel      [ mask . ][ sizes . ][ scale . ]      each begins at a multiple of 512 bytes, as torch's allocator
//   receiver    one block of memory, and views        aligns what has a block to itself
//
// Several copies then become one, and one kernel that puts them together; there are none where they arrive.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gpipe_fast {

struct Parcel {
  struct Part {
    size_t index;       // among the tensors
    at::Tensor tensor;  // as it is on the sender's device
    int64_t offset;     // in the parcel, in bytes
  };
  at::Tensor bytes;  // on the sender's device, in one dimension
  std::vector<Part> parts;

  // What a small tensor has at most, and so many there must be: fewer copies take no longer than the kernel and the copy
  // that would replace them, and how long a larger one takes is no longer what beginning it takes.
  static constexpr int64_t kSmallBytes = int64_t{256} << 10;
  static constexpr size_t kFewest = 3;
  static constexpr int64_t kAlignment = 512;
};

// Of all tensors that are there and have elements. What is put on the calling thread's stream of their device is told by
// `computed`: with `together`, it puts small ones together.
std::vector<Parcel> pack(const std::vector<at::Tensor>& tensors, bool together, bool& computed);
// Puts the parcel's tensors in their places, once its bytes are, or will be, on another device.
void unpack(const Parcel& parcel, const at::Tensor& arrived, std::vector<at::Tensor>& tensors);

}  // namespace gpipe_fast
