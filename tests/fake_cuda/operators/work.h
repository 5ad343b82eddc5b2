// Work that operators enqueue on the streams of the fake runtime.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>

// Defined in runtime/.
extern "C" cudaError_t fake_cuda_access(cudaStream_t stream, const void* pointer, size_t bytes, int writes);
extern "C" void fake_cuda_save(cudaStream_t stream, const void* pointer, size_t bytes);
extern "C" int fake_cuda_capturing(cudaStream_t stream);
extern "C" int fake_cuda_deferring();
extern "C" int fake_cuda_has_context();
extern "C" void fake_cuda_mark(const char* text);
extern "C" void fake_cuda_complete(cudaStream_t stream);
extern "C" void fake_cuda_enqueue(cudaStream_t stream, void (*run)(void*), void (*drop)(void*), void* data);

namespace fake_operators {

// Returns the number of bytes from the beginning of a tensor's first element to the end of its last.
size_t extent_bytes(const at::Tensor& tensor);

void log_access(const at::Tensor& tensor, bool writes);

// With FAKE_CUDA_NAMES, marks an operator in the log by name: now, or at every launch of the graph that captures it.
void log_name(at::Device device, const std::string& name);
// The same for any text.
void log_mark(at::Device device, const std::string& text);

// Stands for what cuBLAS does before a matrix product. Counts the product if the thread has no context. If
// FAKE_CUDA_WORKSPACE is set, allocates that many bytes for the thread and the current stream, unless they have some.
void use_workspace(at::Device device);
// Returns the number of matrix products so far in threads without a context. Tests call it.
extern "C" int64_t fake_cuda_num_without_context();
// Returns the number of workspaces of a stream. Tests call it.
extern "C" int64_t fake_cuda_num_workspaces(cudaStream_t stream);

// Returns whether the current stream of a device is being captured.
bool is_capturing(at::Device device);
// Enqueues a computation on the device's current stream: it runs at every launch of the graph that captures it, or
// later as deferred work.
void enqueue(at::Device device, std::function<void()> run);
// Runs a computation now, unless work is deferred; under capture also at every launch.
void compute_or_enqueue(at::Device device, const std::function<void()>& run);

// Returns a CPU tensor that aliases the same memory.
at::Tensor cpu_alias(const at::Tensor& tensor);

}  // namespace fake_operators
