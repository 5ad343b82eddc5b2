// Copies by CUDA's copy engines, and which devices reach each other's memory.
#include "device/copier.h"

// Torch aligns to cache lines, of whichever processor the compiler thinks.
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

// What torch has enabled also holds for its allocator's memory that is mapped later. It throws where a device says that
// it can, and then cannot.
bool reaches(c10::DeviceIndex device, c10::DeviceIndex other) {
  try {
    return at::cuda::get_p2p_access(device, other);
  } catch (const std::exception&) {
    static_cast<void>(cudaGetLastError());  // else the next call would answer for it
    return false;
  }
}

class CudaCopier final : public Copier {
 public:
  bool connects(at::Device one, at::Device other) const override {
    if (one == other) return true;
    const auto pair = std::minmax({one.index(), other.index()});
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = connected_.find(pair);
    if (known != connected_.end()) return known->second;
    const bool both = reaches(pair.first, pair.second) && reaches(pair.second, pair.first);
    return connected_.emplace(pair, both).first->second;
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

  void keep_for_stream(const at::Tensor& pinned, at::Device on) const override {
    const at::DataPtr& memory = pinned.storage().data_ptr();
    at::getHostAllocator(at::kCUDA)->record_event(memory.get(), memory.get_context(),
                                                  c10::cuda::getCurrentCUDAStream(on.index()));
  }

 private:
  mutable std::mutex mutex_;
  mutable std::map<std::pair<c10::DeviceIndex, c10::DeviceIndex>, bool> connected_;
};

// Never destroyed: pipelines may go later.
[[maybe_unused]] const bool offered = offer_copier(*new CudaCopier);

}  // namespace
}  // namespace gpipe_fast
