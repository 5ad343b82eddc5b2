// The CUDA kernel of gpipe_fast::accumulate_: gathers pairs of equal dtypes into tables and launches them.
#include "program/accumulate.h"

#include <ATen/ops/add.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <vector>

#include "check.h"
#include "cuda/accumulate_kernel.h"

namespace gpipe_fast {
namespace {

std::optional<ElementType> element_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return ElementType::kFloat32;
    case at::kHalf:
      return ElementType::kFloat16;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kDouble:
      return ElementType::kFloat64;
    default:
      return std::nullopt;
  }
}

// Returns whether both tensors are dense and in the same memory order, so that they can be added as flat arrays.
bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) ||
         (a.is_non_overlapping_and_dense() && a.strides() == b.strides());
}

struct Pair {
  void* accumulator;
  const void* gradient;
  int64_t size;
  ElementType accumulator_type;
  ElementType gradient_type;

  bool same_types(const Pair& other) const {
    return accumulator_type == other.accumulator_type && gradient_type == other.gradient_type;
  }
};

// Collects pairs in a table. Launches the kernel whenever the table is full; the caller launches the rest.
class Launcher {
 public:
  Launcher(const Pair& first, cudaStream_t stream) : stream_(stream) {
    args_.num_tensors = 0;
    args_.first_chunk[0] = 0;
    args_.accumulator_type = first.accumulator_type;
    args_.gradient_type = first.gradient_type;
  }

  void add(const Pair& pair) {
    const int64_t chunks = (pair.size + AccumulateArgs::kChunkElements - 1) / AccumulateArgs::kChunkElements;
    constexpr int64_t kMaxChunks = std::numeric_limits<int32_t>::max();
    GPIPE_CHECK(chunks <= kMaxChunks, "accumulate_: ", pair.size, " elements are too many for one tensor");
    if (args_.num_tensors == AccumulateArgs::kMaxTensors ||
        args_.first_chunk[args_.num_tensors] > kMaxChunks - chunks) {
      launch();
    }
    const int32_t slot = args_.num_tensors++;
    args_.accumulators[slot] = pair.accumulator;
    args_.gradients[slot] = pair.gradient;
    args_.sizes[slot] = pair.size;
    args_.first_chunk[slot + 1] = args_.first_chunk[slot] + static_cast<int32_t>(chunks);
  }

  void launch() {
    launch_accumulate(args_, stream_);
    args_.num_tensors = 0;
  }

 private:
  AccumulateArgs args_;
  cudaStream_t stream_;
};

// Only launches kernels, with the tables as kernel arguments, so it can be captured in a CUDA graph.
void add_cuda(at::TensorList accumulators, at::TensorList gradients) {
  const c10::cuda::CUDAGuard guard(accumulators[0].device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();

  std::vector<Pair> pairs;
  pairs.reserve(accumulators.size());
  for (size_t i = 0; i < accumulators.size(); ++i) {
    const at::Tensor& accumulator = accumulators[i];
    const auto accumulator_type = element_type(accumulator);
    const auto gradient_type = element_type(gradients[i]);
    if (!accumulator_type || !gradient_type || !same_layout(accumulator, gradients[i])) {
      accumulator.add_(gradients[i]);
      continue;
    }
    if (accumulator.numel() == 0) continue;
    pairs.push_back({accumulator.mutable_data_ptr(), gradients[i].const_data_ptr(), accumulator.numel(),
                     *accumulator_type, *gradient_type});
  }

  // One table per pair of dtypes; a model has one or two.
  while (!pairs.empty()) {
    Launcher launcher(pairs.front(), stream);
    std::vector<Pair> others;
    for (const Pair& pair : pairs) {
      if (pair.same_types(pairs.front())) {
        launcher.add(pair);
      } else {
        others.push_back(pair);
      }
    }
    launcher.launch();
    pairs = std::move(others);
  }
}

void accumulate_cuda(at::TensorList accumulators, at::TensorList gradients) {
  check_pairs(accumulators, gradients);
  check_disjoint(accumulators, gradients);
  if (accumulators.empty()) return;
  // add_ does the same; without it autograd would not detect that a saved tensor was modified.
  for (const at::Tensor& accumulator : accumulators) {
    if (!accumulator.is_inference()) accumulator.unsafeGetTensorImpl()->bump_version();
  }
  add_cuda(accumulators, gradients);
}

}  // namespace

TORCH_LIBRARY_IMPL(gpipe_fast, CUDA, m) {
  m.impl("accumulate_", &accumulate_cuda);
  m.impl("_accumulate_", &add_cuda);
}

}  // namespace gpipe_fast
