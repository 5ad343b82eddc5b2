// Stubs of the driver API. The library has the driver's soname, so that the loader finds it in place of the driver.
#include "log.h"
#include "streams.h"

#include <cuda_runtime_api.h>

namespace fake_cuda {

extern "C" {

int fake_cuda_no_driver_call() { return 801; }  // CUDA_ERROR_NOT_SUPPORTED

int cuDevicePrimaryCtxGetState(int, unsigned int* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "not supported by the fake driver";
  return 0;
}
int cuLaunchKernel(void* kernel, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
                   unsigned int, unsigned int, cudaStream_t stream, void**, void**) {
  (void)enqueue(stream, "kernel", text("%p", kernel));
  return 0;
}

#define NO_DRIVER_CALL(NAME) \
  int NAME() { return fake_cuda_no_driver_call(); }
NO_DRIVER_CALL(cuCtxGetCurrent)
NO_DRIVER_CALL(cuCtxSetCurrent)
NO_DRIVER_CALL(cuDeviceGet)
NO_DRIVER_CALL(cuDeviceGetAttribute)
NO_DRIVER_CALL(cuDevicePrimaryCtxRetain)
NO_DRIVER_CALL(cuFuncGetAttribute)
NO_DRIVER_CALL(cuFuncSetAttribute)
NO_DRIVER_CALL(cuFuncSetCacheConfig)
NO_DRIVER_CALL(cuLaunchCooperativeKernel)
NO_DRIVER_CALL(cuLinkAddData_v2)
NO_DRIVER_CALL(cuLinkComplete)
NO_DRIVER_CALL(cuLinkCreate_v2)
NO_DRIVER_CALL(cuModuleGetFunction)
NO_DRIVER_CALL(cuModuleLoad)
NO_DRIVER_CALL(cuModuleLoadData)
NO_DRIVER_CALL(cuModuleLoadDataEx)
NO_DRIVER_CALL(cuModuleUnload)
NO_DRIVER_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NO_DRIVER_CALL(cuPointerGetAttribute)
NO_DRIVER_CALL(cuTensorMapEncodeTiled)
#undef NO_DRIVER_CALL

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&fake_cuda_no_driver_call);
  if (result != nullptr) {
    *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t,
                                                                   unsigned int) {
  *count = 2;
  return cudaSuccess;
}

}  // extern "C"

}  // namespace fake_cuda
