// One launch of the accumulation kernel: up to kMaxTensors pairs, split into chunks of kChunkElements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gpipe_fast {

enum class ElementType : int32_t { kFloat32, kFloat16, kBFloat16, kFloat64 };

// Passed to the kernel by value, so a launch needs no copy and can be captured in a CUDA graph.
// Pair p holds sizes[p] > 0 elements and owns the chunks from first_chunk[p] up to first_chunk[p + 1]:
//
//   sizes        20000  100  8192          (kChunkElements = 8192)
//   first_chunk  0      3    4     5       one block per chunk
//
// All pairs have the same element types. An accumulator overlaps no other tensor.
struct AccumulateArgs {
  static constexpr int32_t kMaxTensors = 128;
  static constexpr int64_t kChunkElements = 8192;

  void* accumulators[kMaxTensors];
  const void* gradients[kMaxTensors];
  int64_t sizes[kMaxTensors];
  int32_t first_chunk[kMaxTensors + 1];
  int32_t num_tensors;
  ElementType accumulator_type;
  ElementType gradient_type;
};

static_assert(sizeof(AccumulateArgs) <= 4096, "kernel arguments are limited to 4 KiB");

// Enqueues accumulator += gradient for every pair of `args` on `stream`. The memory must stay valid until the
// stream has executed it. Computes in float, or in double if either type is double, and rounds once.
void launch_accumulate(const AccumulateArgs& args, cudaStream_t stream);

}  // namespace gpipe_fast
