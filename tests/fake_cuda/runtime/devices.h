// The devices, which of them reach another's memory, and errors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace fake_cuda {

// Of each device.
size_t memory_bytes();
int num_devices();

extern thread_local int current_device;

// Returns the error, which the calling thread then can ask for.
cudaError_t fail(cudaError_t error);

// An illegal access on a device, after which every call fails, and nothing runs any more.
void fail_for_good();
bool failed_for_good();

// At the head of a call.
#define RETURN_IF_FAILED_FOR_GOOD()       \
  if (failed_for_good()) {                \
    return fail(cudaErrorIllegalAddress); \
  }

// Kernels and graphs are launched on streams of the current device alone.
#define RETURN_IF_NOT_CURRENT(STREAM)            \
  if (of(STREAM)->device != current_device) {    \
    return fail(cudaErrorInvalidResourceHandle); \
  }

}  // namespace fake_cuda
