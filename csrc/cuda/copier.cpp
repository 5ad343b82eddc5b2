// Copies with CUDA's copy engines, and peer access between devices.
#include "device/copier.h"

// PyTorch's header aligns to the compiler's guess of the cache line size, about which GCC warns.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Winterference-size"
#include <ATen/core/CachingHostAllocator.h>
#pragma GCC diagnostic pop
#include <ATen/cuda/PeerToPeerAccess.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

namespace gpipe_fast {
namespace {

// Returns whether `device` can access the memory of `other`; enables the access. PyTorch also enables it for memory
// that its allocator maps later, and throws if a device reports peer access as possible but enabling it fails.
bool try_peer_access(c10::DeviceIndex device, c10::DeviceIndex other) {
  try {
    return at::cuda::get_p2p_access(device, other);
  } catch (const std::exception&) {
    static_cast<void>(cudaGetLastError());  // clears the error, so that the next call does not report it
    return false;
  }
}

class CudaCopier final : public Copier {
 public:
  bool enable_peer_access(at::Device one, at::Device other) const override {
    if (one == other) return true;
    const auto pair = std::minmax({one.index(), other.index()});
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto cached = peer_access_.find(pair);
    if (cached != peer_access_.end()) return cached->second;
    const bool both = try_peer_access(pair.first, pair.second) && try_peer_access(pair.second, pair.first);
    return peer_access_.emplace(pair, both).first->second;
  }

  void copy(const at::Tensor& target, const at::Tensor& source, at::Device on) const override {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(on.index()).stream();
    void* const to = target.data_ptr();
    const void* const from = source.const_data_ptr();
    if (target.is_cuda() && source.is_cuda() && target.device() != source.device()) {
      C10_CUDA_CHECK(c10::cuda::CUDACachingAllocator::memcpyAsync(
          to, target.get_device(), from, source.get_device(), source.nbytes(), stream, /*p2p_enabled=*/true));
    } else {
      C10_CUDA_CHECK(cudaMemcpyAsync(to, from, source.nbytes(), cudaMemcpyDefault, stream));
    }
  }

  void record_stream(const at::Tensor& pinned, at::Device on) const override {
    const at::DataPtr& memory = pinned.storage().data_ptr();
    at::getHostAllocator(at::kCUDA)->record_event(memory.get(), memory.get_context(),
                                                  c10::cuda::getCurrentCUDAStream(on.index()));
  }

 private:
  mutable std::mutex mutex_;
  mutable std::map<std::pair<c10::DeviceIndex, c10::DeviceIndex>, bool> peer_access_;
};

// The copier is never destroyed, because pipelines may outlive static objects.
[[maybe_unused]] const bool registered = register_copier(*new CudaCopier);

}  // namespace
}  // namespace gpipe_fast
