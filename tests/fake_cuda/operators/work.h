// What operators put on the streams of the fake runtime.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>

// The runtime's: runtime/streams.cpp and runtime/graphs.cpp.
extern "C" cudaError_t fake_cuda_access(cudaStream_t stream, const void* pointer, size_t bytes, int writes);
extern "C" void fake_cuda_keep(cudaStream_t stream, const void* pointer, size_t bytes);
extern "C" int fake_cuda_capturing(cudaStream_t stream);
extern "C" int fake_cuda_deferring();
extern "C" void fake_cuda_mark(const char* text);
extern "C" void fake_cuda_finish(cudaStream_t stream);
extern "C" void fake_cuda_node(cudaStream_t stream, void (*run)(void*), void (*drop)(void*), void* data);

namespace fake_operators {

// The bytes from a tensor's first element to its last.
size_t extent(const at::Tensor& tensor);

void log_access(const at::Tensor& tensor, bool writes);

// With FAKE_CUDA_NAMES, marks what is launched on a device by its name: now, or at every launch of the graph that captures
// it.
void log_name(at::Device device, const std::string& name);

// Whether a graph captures what is put on a device now.
bool captures(at::Device device);
// What a graph does at every launch, or the stream later.
void put(at::Device device, std::function<void()> run);
// Now, unless work is deferred; and at every launch.
void compute_or_put(at::Device device, const std::function<void()>& run);

// The same memory as a tensor on the CPU.
at::Tensor on_host(const at::Tensor& tensor);

}  // namespace fake_operators
