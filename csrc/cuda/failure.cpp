// Failures of CUDA devices, which CUDA calls sticky errors.
#include "device/failure.h"

#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <string>

namespace gpipe_fast {
namespace {

// Creates an event, because every call that uses a failed device's context fails. Running out of memory is no failure.
std::string find_failure(c10::DeviceIndex device) {
  int previous = 0;
  cudaEvent_t event = nullptr;
  cudaError_t error = cudaGetDevice(&previous);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (error == cudaSuccess) error = cudaEventDestroy(event);
  (void)c10::cuda::MaybeSetDevice(previous);           // creates no context
  if (error != cudaSuccess) (void)cudaGetLastError();  // not that of an earlier call, which others look for
  return error == cudaSuccess || error == cudaErrorMemoryAllocation ? "" : cudaGetErrorString(error);
}

[[maybe_unused]] const bool registered = register_find_failure(&find_failure);

}  // namespace
}  // namespace gpipe_fast
