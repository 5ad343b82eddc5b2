#include "work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <tuple>
#include <utility>

namespace fake_operators {

size_t extent_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return static_cast<size_t>(last + 1) * tensor.itemsize();
}

void log_access(const at::Tensor& tensor, bool writes) {
  if (tensor.is_cuda() && tensor.numel() > 0) {
    const c10::cuda::CUDAGuard guard(tensor.device());  // the current device selects the default stream
    const auto stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(
        fake_cuda_access(stream.stream(), tensor.const_data_ptr(), extent_bytes(tensor), writes ? 1 : 0));
  }
}

void log_name(at::Device device, const std::string& name) { log_mark(device, "operator\t" + name); }

void log_mark(at::Device device, const std::string& text) {
  static const bool wanted = std::getenv("FAKE_CUDA_NAMES") != nullptr;
  if (!wanted) {
    return;
  }
  if (is_capturing(device)) {
    enqueue(device, [text] { fake_cuda_mark(text.c_str()); });
  } else {
    fake_cuda_mark(text.c_str());
  }
}

namespace {

// PyTorch's workspaces, by handle and stream. In some versions a mutex is beside them, and sizes are.
template <class Found>
auto& map_of(Found& found) {
  if constexpr (requires { found.map; }) {
    return found.map;
  } else {
    return found;
  }
}
auto& workspaces() { return map_of(at::cuda::cublas_handle_stream_to_workspace()); }

template <class Workspace>
void allocate(Workspace& workspace, size_t bytes) {
  at::DataPtr memory = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  if constexpr (requires { workspace.first; }) {
    workspace = {std::move(memory), bytes};
  } else {
    workspace = std::move(memory);
  }
}

std::atomic<int64_t> num_without_context{0};

std::mutex& workspaces_mutex() {
  static auto* const made = new std::mutex;
  return *made;
}

}  // namespace

void use_workspace(at::Device device) {
  num_without_context += fake_cuda_has_context() ? 0 : 1;
  static const char* const bytes = std::getenv("FAKE_CUDA_WORKSPACE");
  if (bytes == nullptr) {
    return;
  }
  const c10::cuda::CUDAGuard guard(device);
  thread_local char handle = 0;
  const std::lock_guard<std::mutex> lock(workspaces_mutex());
  const auto [place, is_new] =
      workspaces().try_emplace({&handle, c10::cuda::getCurrentCUDAStream().stream()});
  if (is_new) {
    allocate(place->second, std::strtoull(bytes, nullptr, 10));
  }
}

extern "C" int64_t fake_cuda_num_workspaces(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(workspaces_mutex());
  return std::count_if(workspaces().begin(), workspaces().end(),
                       [&](const auto& entry) { return std::get<1>(entry.first) == stream; });
}

extern "C" int64_t fake_cuda_num_without_context() { return num_without_context; }

bool is_capturing(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  return fake_cuda_capturing(c10::cuda::getCurrentCUDAStream().stream()) != 0;
}
void enqueue(at::Device device, std::function<void()> run) {
  const c10::cuda::CUDAGuard guard(device);
  fake_cuda_enqueue(
      c10::cuda::getCurrentCUDAStream().stream(),
      [](void* data) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        (*static_cast<std::function<void()>*>(data))();
      },
      [](void* data) { delete static_cast<std::function<void()>*>(data); },
      new std::function<void()>(std::move(run)));
}

void compute_or_enqueue(at::Device device, const std::function<void()>& run) {
  if (fake_cuda_deferring() == 0) {
    run();
  }
  if (fake_cuda_deferring() != 0 || is_capturing(device)) {
    enqueue(device, run);
  }
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

}  // namespace fake_operators
