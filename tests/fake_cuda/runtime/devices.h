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

}  // namespace fake_cuda
