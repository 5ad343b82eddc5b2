// Copies with CUDA's copy engines, and peer access between devices.
#include "device/copier.h"

// PyTorch's header aligns to the compiler's guess of the cache line size, about which GCC warns.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Winterference-size"
#include <ATen/core/CachingHostAllocator.h>
#pragma GCC diagnostic pop
#include <ATen/cuda/PeerToPeerAccess.h>
#include <ATen/ops/arange.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/StringUtil.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace gpipe_fast {
namespace {

// Returns the error if `device` cannot get access to the memory of `other`, else nullptr. PyTorch's function makes its
// allocator map memory for peers, but after an error it reports that the access is enabled (get_p2p_access in
// c10/cuda/PeerToPeerAccess.cpp), so it is called last.
const char* enable_peer_access(at::Device device, at::Device other) {
  const c10::cuda::CUDAGuard guard(device);
  const cudaError_t error = cudaDeviceEnablePeerAccess(other.index(), 0);
  if (error != cudaSuccess) (void)cudaGetLastError();  // this error
  if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled) return cudaGetErrorString(error);
  at::cuda::get_p2p_access(device.index(), other.index());
  return nullptr;
}

bool reports_peer_access(at::Device device, at::Device other) {
  int reported = 0;
  C10_CUDA_CHECK(cudaDeviceCanAccessPeer(&reported, device.index(), other.index()));
  return reported != 0;
}

class CudaCopier final : public Copier {
 public:
  const PeerAccess& peer_access(at::Device one, at::Device other) const override {
    const auto pair = std::minmax({one.index(), other.index()});
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto cached = peer_access_.find(pair);
    if (cached != peer_access_.end()) return cached->second;
    return peer_access_.emplace(pair, find_peer_access(one, other)).first->second;
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
  PeerAccess find_peer_access(at::Device one, at::Device other) const {
    if (one == other) return {true, ""};
    if (!reports_peer_access(one, other) || !reports_peer_access(other, one)) return {};
    for (const auto& [device, peer] : {std::pair(one, other), std::pair(other, one)}) {
      const char* const error = enable_peer_access(device, peer);
      if (error != nullptr) return {false, c10::str("CUDA cannot enable it for ", device, ": ", error)};
    }
    for (const auto& [from, to] : {std::pair(one, other), std::pair(other, one)}) {
      if (!bytes_arrive(from, to))
        return {false, c10::str("bytes copied from ", from, " to ", to, " arrive changed")};
    }
    return {true, ""};
  }

  // With an IOMMU or PCI access control services, or by a faulty bridge, copies between peers arrive wrong without an
  // error (CUDA Programming Guide, section "Host IOMMU Hardware, PCI Access Control Services, and VMs";
  // pytorch/pytorch#84803).
  bool bytes_arrive(at::Device from, at::Device to) const {
    const at::Tensor bytes = at::arange(kCheckedBytes / 4, at::kInt);
    const at::Tensor source = bytes.to(from), target = bytes.bitwise_not().to(to);  // nothing may arrive
    const c10::cuda::CUDAGuard guard(from);  // a default stream is that of the current device
    copy(target, source, from);
    c10::cuda::getCurrentCUDAStream(from.index()).synchronize();
    return target.cpu().equal(bytes);
  }

  static constexpr int64_t kCheckedBytes = int64_t{64} << 10;

  mutable std::mutex mutex_;
  mutable std::map<std::pair<c10::DeviceIndex, c10::DeviceIndex>, PeerAccess> peer_access_;
};

// The copier is never destroyed, because pipelines may outlive static objects.
[[maybe_unused]] const bool registered = register_copier(*new CudaCopier);

}  // namespace
}  // namespace gpipe_fast
