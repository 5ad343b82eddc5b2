// Device failures: errors after which every call for a device fails until the process ends, such as an index out of
// range in a CUDA kernel.
//
// PyTorch's allocators record stream events when a tensor is freed that several streams have used, or a pinned one. On a
// failed device this throws, in the tensor's destructor, so the process aborts: the user sees neither the exception nor
// the action that failed. Therefore such tensors are never freed once a device has failed, and before that is known,
// the pipeline frees its own by free_shared(). The allocator's tables are damaged by such an error, too, so no run
// begins on a failed device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace gpipe_fast {

// Notes a tensor that several streams use, or a pinned one that a stream uses. Thread safe.
void note_shared(const at::Tensor& tensor);

// Frees such tensors, unless others refer to their memory. Never throws: if a device has failed, the next call for it
// reports that.
void free_shared(std::vector<at::Tensor>& tensors) noexcept;

// If the device has failed, keeps all living tensors that were noted until the process ends. Call when an error was
// caught, before tensors are freed. Thread safe.
void survive_failure(at::Device device) noexcept;

// Throws std::runtime_error if survive_failure() has found that the device has failed. Thread safe.
void check_alive(at::Device device);

// Registers the function that returns a CUDA device's failure, empty if there is none. Called while libraries are
// loaded.
using FindFailure = std::string (*)(c10::DeviceIndex device);
bool register_find_failure(FindFailure function);

}  // namespace gpipe_fast
