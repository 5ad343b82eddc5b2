// Keyed draws: each thread computes one block of Philox words and the elements drawn from it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "check.h"
#include "cuda/narrow.h"
#include "cuda/random_kernel.h"
#include "random/random.h"

namespace gpipe_fast {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 20;  // of threads; each thread loops over further blocks of words
constexpr int64_t kNoLayer = 0xFFFF;

__device__ PhiloxStream philox_stream(const DrawArgs& args) {
  const int64_t layer = args.layer == kNoLayer ? kNoLayer : args.key[2] + args.layer;
  return {static_cast<uint64_t>(args.key[0]), static_cast<uint32_t>(args.key[1]),
          static_cast<uint32_t>(layer << 16 | args.ordinal)};
}

// Fills the output. For each block of words, `loop` computes kPerBlock elements of type V, which are converted to T.
template <typename T, typename V, int kPerBlock, typename Loop>
__global__ void __launch_bounds__(kThreads) fill(DrawArgs args, Loop loop) {
  const PhiloxStream stream = philox_stream(args);
  T* out = static_cast<T*>(args.out);
  const int64_t blocks = (args.size + kPerBlock - 1) / kPerBlock;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; block < blocks;
       block += step) {
    uint32_t words[kWordsPerBlock];
    V values[kPerBlock];
    philox_blocks_portable(stream, static_cast<uint64_t>(block), 1, words);
    loop(words, values);
    const int64_t first = block * kPerBlock;
#pragma unroll
    for (int i = 0; i < kPerBlock; ++i) {
      if (first + i < args.size) out[first + i] = narrow<T>(values[i]);
    }
  }
}

template <typename T, typename V, int kPerBlock, typename Loop>
void launch(const DrawArgs& args, const Loop& loop) {
  const int64_t blocks = (args.size + kPerBlock - 1) / kPerBlock;
  const int64_t grid = std::min((blocks + kThreads - 1) / kThreads, kMaxBlocks);
  fill<T, V, kPerBlock><<<static_cast<unsigned>(grid), kThreads, 0, args.stream>>>(args, loop);
  const cudaError_t error = cudaGetLastError();
  GPIPE_CHECK(error == cudaSuccess, "launch of a keyed random op failed: ", cudaGetErrorString(error));
}

// Draws float and double in their own precision, and the 16-bit types in float, rounded afterwards.
// `make(V{})` returns the loop for the type V of the draw.
template <typename Make>
void launch_floating(const DrawArgs& args, DrawType type, const Make& make) {
  switch (type) {
    case DrawType::kFloat32:
      return launch<float, float, 4>(args, make(float{}));
    case DrawType::kFloat16:
      return launch<__half, float, 4>(args, make(float{}));
    case DrawType::kBFloat16:
      return launch<__nv_bfloat16, float, 4>(args, make(float{}));
    case DrawType::kFloat64:
      return launch<double, double, 2>(args, make(double{}));
    default:
      GPIPE_CHECK(false, "a keyed random op for floating-point types got an integer dtype");
  }
}

template <typename Bits>
struct Bernoulli {
  uint32_t last;
  uint64_t one;
  __device__ void operator()(const uint32_t* words, Bits* values) const {
    select_one<Bits>(words, kWordsPerBlock, last, one, values);
  }
};

template <typename V>
struct Uniform {
  int digits;
  V low, high, limit;
  __device__ void operator()(const uint32_t* words, V* values) const {
    uniform_loop(words, 16 / sizeof(V), digits, low, high, limit, values);
  }
};

template <typename V>
struct Normal {
  V mean, std;
  __device__ void operator()(const uint32_t* words, V* values) const {
    normal_loop(words, 16 / sizeof(V), mean, std, values);
  }
};

template <typename V>
struct Exponential {
  V scale;
  __device__ void operator()(const uint32_t* words, V* values) const {
    exponential_loop(words, 16 / sizeof(V), scale, values);
  }
};

struct Integer {
  int64_t smallest;
  uint64_t span;
  __device__ void operator()(const uint32_t* words, int64_t* values) const {
    integer_loop(words, 2, smallest, span, values);
  }
};

}  // namespace

void launch_bernoulli(const DrawArgs& args, uint64_t threshold, uint64_t one, int64_t itemsize) {
  const auto last = static_cast<uint32_t>(threshold - 1);
  switch (itemsize) {
    case 1:
      return launch<uint8_t, uint8_t, 4>(args, Bernoulli<uint8_t>{last, one});
    case 2:
      return launch<uint16_t, uint16_t, 4>(args, Bernoulli<uint16_t>{last, one});
    case 4:
      return launch<uint32_t, uint32_t, 4>(args, Bernoulli<uint32_t>{last, one});
    default:
      return launch<uint64_t, uint64_t, 4>(args, Bernoulli<uint64_t>{last, one});
  }
}

void launch_uniform(const DrawArgs& args, DrawType type, int digits, double low, double high, double limit) {
  launch_floating(args, type, [&](auto kind) {
    using V = decltype(kind);
    return Uniform<V>{digits, static_cast<V>(low), static_cast<V>(high), static_cast<V>(limit)};
  });
}

void launch_normal(const DrawArgs& args, DrawType type, double mean, double std) {
  launch_floating(args, type, [&](auto kind) {
    using V = decltype(kind);
    return Normal<V>{static_cast<V>(mean), static_cast<V>(std)};
  });
}

void launch_exponential(const DrawArgs& args, DrawType type, double scale) {
  launch_floating(args, type, [&](auto kind) {
    using V = decltype(kind);
    return Exponential<V>{static_cast<V>(scale)};
  });
}

void launch_integer(const DrawArgs& args, DrawType type, int64_t smallest, uint64_t span) {
  const Integer loop{smallest, span};
  switch (type) {
    case DrawType::kFloat32:
      return launch<float, int64_t, 2>(args, loop);
    case DrawType::kFloat16:
      return launch<__half, int64_t, 2>(args, loop);
    case DrawType::kBFloat16:
      return launch<__nv_bfloat16, int64_t, 2>(args, loop);
    case DrawType::kFloat64:
      return launch<double, int64_t, 2>(args, loop);
    case DrawType::kInt8:
      return launch<int8_t, int64_t, 2>(args, loop);
    case DrawType::kInt16:
      return launch<int16_t, int64_t, 2>(args, loop);
    case DrawType::kInt32:
      return launch<int32_t, int64_t, 2>(args, loop);
    case DrawType::kInt64:
      return launch<int64_t, int64_t, 2>(args, loop);
    case DrawType::kUint8:
      return launch<uint8_t, int64_t, 2>(args, loop);
    case DrawType::kBool:
      return launch<bool, int64_t, 2>(args, loop);
  }
}

}  // namespace gpipe_fast
