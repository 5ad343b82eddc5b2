// The contexts of threads, and CUDA streams outside PyTorch's pool. That pool has 32 streams per device and hands them
// out round-robin, so pipelines with many stages, or other threads, would share streams and capture each other's work.
#include "device/stream.h"

#include "device/context.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace gpipe_fast {
namespace {

c10::Stream make(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return c10::cuda::getStreamFromExternal(stream, device.index()).unwrap();
}

// PyTorch calls cudaSetDevice() only for another device than the current one. So a new thread on device 0 would have no
// context before its first call of the runtime, and PyTorch warns if cuBLAS runs in such a thread.
void set_context(at::Device device) {
  thread_local bool has_context = false;
  if (has_context) return;
  C10_CUDA_CHECK(c10::cuda::SetDevice(device.index(), /*force=*/true));
  has_context = true;
}

[[maybe_unused]] const bool is_registered = register_stream_factory(&make);
[[maybe_unused]] const bool sets_context = register_context_setter(&set_context);

}  // namespace
}  // namespace gpipe_fast
