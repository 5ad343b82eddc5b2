// accumulator += gradient for a table of tensor pairs, one block per chunk.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "check.h"
#include "cuda/accumulate_kernel.h"
#include "cuda/narrow.h"

namespace gpipe_fast {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;

template <typename A, typename G>
using Compute = std::conditional_t<std::is_same_v<A, double> || std::is_same_v<G, double>, double, float>;

// Explicit, because PyTorch's compiler flags disable the implicit conversions of __half and __nv_bfloat16.
template <typename C, typename T>
__device__ C widen(T value) {
  return static_cast<C>(value);
}
template <typename C>
__device__ C widen(__half value) {
  return static_cast<C>(__half2float(value));
}
template <typename C>
__device__ C widen(__nv_bfloat16 value) {
  return static_cast<C>(__bfloat162float(value));
}

template <typename A, typename G>
__device__ A sum(A accumulator, G gradient) {
  using C = Compute<A, G>;
  return narrow<A>(widen<C>(accumulator) + widen<C>(gradient));
}

// Aligned to one vector load even if it spans several.
template <typename T, int N>
struct alignas(kVectorBytes) Pack {
  T values[N];
};

// Returns the pair that owns `chunk`: the last one whose first chunk is not after it.
__device__ int pair_of_chunk(const AccumulateArgs& args, int32_t chunk) {
  int low = 0;
  int high = args.num_tensors;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (args.first_chunk[middle] <= chunk ? low : high) = middle;
  }
  return low;
}

template <typename A, typename G>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(const __grid_constant__ AccumulateArgs args) {
  // The number of elements in one vector load of the narrower type. Chunks start at multiples of it.
  constexpr int kPack = kVectorBytes / (sizeof(A) < sizeof(G) ? sizeof(A) : sizeof(G));
  static_assert(AccumulateArgs::kChunkElements % kPack == 0);

  const int32_t chunk = blockIdx.x;
  const int pair = pair_of_chunk(args, chunk);
  const int64_t offset = (chunk - args.first_chunk[pair]) * AccumulateArgs::kChunkElements;
  const int64_t rest = args.sizes[pair] - offset;
  const int length =
      static_cast<int>(rest < AccumulateArgs::kChunkElements ? rest : AccumulateArgs::kChunkElements);
  A* __restrict__ accumulator = static_cast<A*>(args.accumulators[pair]) + offset;
  const G* __restrict__ gradient = static_cast<const G*>(args.gradients[pair]) + offset;

  const auto address_bits = reinterpret_cast<uintptr_t>(accumulator) | reinterpret_cast<uintptr_t>(gradient);
  const int packed = address_bits % kVectorBytes == 0 ? length / kPack : 0;
  auto* accumulator_packs = reinterpret_cast<Pack<A, kPack>*>(accumulator);
  const auto* gradient_packs = reinterpret_cast<const Pack<G, kPack>*>(gradient);
#pragma unroll 4
  for (int i = threadIdx.x; i < packed; i += kThreads) {
    Pack<A, kPack> a = accumulator_packs[i];
    const Pack<G, kPack> g = gradient_packs[i];
#pragma unroll
    for (int k = 0; k < kPack; ++k) a.values[k] = sum(a.values[k], g.values[k]);
    accumulator_packs[i] = a;
  }
  for (int i = packed * kPack + threadIdx.x; i < length; i += kThreads) {
    accumulator[i] = sum(accumulator[i], gradient[i]);
  }
}

// Calls `f` with a value of the C++ type that `type` names.
template <typename F>
void dispatch_type(ElementType type, F&& f) {
  switch (type) {
    case ElementType::kFloat32:
      return f(float{});
    case ElementType::kFloat16:
      return f(__half{});
    case ElementType::kBFloat16:
      return f(__nv_bfloat16{});
    case ElementType::kFloat64:
      return f(double{});
  }
  GPIPE_CHECK(false, "accumulate: unknown element type ", static_cast<int>(type));
}

}  // namespace

void launch_accumulate(const AccumulateArgs& args, cudaStream_t stream) {
  const int32_t num_chunks = args.first_chunk[args.num_tensors];
  if (num_chunks == 0) return;
  dispatch_type(args.accumulator_type, [&](auto accumulator) {
    dispatch_type(args.gradient_type, [&](auto gradient) {
      accumulate_kernel<decltype(accumulator), decltype(gradient)><<<num_chunks, kThreads, 0, stream>>>(args);
    });
  });
  GPIPE_CHECK_CUDA(cudaGetLastError());
}

}  // namespace gpipe_fast
