#include "work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdlib>
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
