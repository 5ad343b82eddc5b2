// Devices, peer access and errors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace fake_cuda {

// Returns the memory of each device, in bytes.
size_t memory_bytes();
int num_devices();
// Returns whether copies from one device to another arrive wrong, without an error: those to a peer.
bool copies_arrive_wrong(int source, int target);

extern thread_local int current_device;
// Whether the calling thread has called cudaSetDevice(). Other calls make a context current, too, but not all do.
extern thread_local bool has_context;

// Stores the error as the calling thread's last error, and returns it.
cudaError_t fail(cudaError_t error);

// A sticky error (an illegal memory access): every later call fails, and no more work runs.
void set_sticky_error();
bool has_sticky_error();

// The first statement of a runtime function.
#define RETURN_IF_STICKY_ERROR()          \
  if (has_sticky_error()) {               \
    return fail(cudaErrorIllegalAddress); \
  }

// Kernels and graphs can only be launched on streams of the current device.
#define RETURN_IF_NOT_CURRENT(STREAM)                \
  if (stream_of(STREAM)->device != current_device) { \
    return fail(cudaErrorInvalidResourceHandle);     \
  }

}  // namespace fake_cuda
