// Copies between memories, as a kind of device makes them itself; csrc/cuda/copier.cpp has CUDA's. What torch's
// device-neutral interface can do is no part of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>

namespace gpipe_fast {

// Thread safe.
class Copier {
 public:
  virtual ~Copier() = default;

  // Whether each of two devices accesses the other's memory; asked for the first time, it sees to that. False where they
  // cannot, and where it fails. Not to be asked for the first time while work is captured.
  virtual bool connects(at::Device one, at::Device other) const = 0;

  // Puts a copy on the stream that the calling thread has on a device, `on`. Memory of the host is pinned.
  virtual void copy(const at::Tensor& target, const at::Tensor& source, at::Device on) const = 0;

  // Once a block of pinned memory is let go of, nobody else gets it before all is done that is then on that stream.
  virtual void keep_for_stream(const at::Tensor& pinned, at::Device on) const = 0;
};

// CUDA's; null in a build without it.
const Copier* copier();
// Called while libraries are loaded.
bool offer_copier(const Copier& copier);

}  // namespace gpipe_fast
