// Asynchronous copies between host and device memories, for operations that PyTorch's device-neutral interface
// lacks. csrc/cuda/copier.cpp has the CUDA implementation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>

namespace gpipe_fast {

// Whether two GPUs can copy directly to each other.
struct PeerAccess {
  bool works = false;
  std::string fault;  // why it does not work although the GPUs report it; else empty
};

// Thread safe.
class Copier {
 public:
  virtual ~Copier() = default;

  // Returns whether two GPUs can copy directly to each other. The first call for a pair enables peer access, copies
  // bytes in both directions and compares them; it must not happen during a capture. GPUs may have only eight peers
  // each, so ask only for pairs that exchange tensors.
  virtual const PeerAccess& peer_access(at::Device one, at::Device other) const = 0;

  // Enqueues a copy on the calling thread's current stream of the device `on`. Host memory must be pinned.
  virtual void copy(const at::Tensor& target, const at::Tensor& source, at::Device on) const = 0;

  // Records that the calling thread's current stream of the device `on` uses a block of pinned memory: once
  // freed, the block is reused only after the work that is on that stream at that time has finished.
  virtual void record_stream(const at::Tensor& pinned, at::Device on) const = 0;
};

// Returns the CUDA copier; null in a build without CUDA.
const Copier* copier();
// Registers the copier. Called while libraries are loaded.
bool register_copier(const Copier& copier);

}  // namespace gpipe_fast
