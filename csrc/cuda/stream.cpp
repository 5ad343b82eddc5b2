// CUDA streams outside PyTorch's pool. That pool has 32 streams per device and hands them out round-robin, so
// pipelines with many stages, or other threads, would share streams and capture each other's work.
#include "device/stream.h"

#include <c10/cuda/CUDAException.h>
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

[[maybe_unused]] const bool is_registered = register_stream_factory(&make);

}  // namespace
}  // namespace gpipe_fast
