// Keyed draws on a GPU. They have the same bits as those of csrc/random/random.cpp, except that in double
// precision the last bits of normal and exponential draws may differ.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gpipe_fast {

// Element type of a draw.
enum class DrawType : int32_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat64,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUint8,
  kBool,
};

// Output, key and stream of one draw. The kernel reads the key from memory, so replaying a captured launch draws with
// the key's current values. The kernel does not check the ranges of these values; out-of-range values give
// unspecified draws.
struct DrawArgs {
  void* out;
  int64_t size;
  const int64_t* key;  // [mini-batch key, micro-batch, first layer], on the GPU
  int64_t layer;
  int64_t ordinal;
  cudaStream_t stream;
};

// Writes `one`, a bit pattern of `itemsize` bytes, for words below `threshold`, and zero for the others. `threshold`
// must not be 0.
void launch_bernoulli(const DrawArgs& args, uint64_t threshold, uint64_t one, int64_t itemsize);
void launch_uniform(const DrawArgs& args, DrawType type, int digits, double low, double high, double limit);
void launch_normal(const DrawArgs& args, DrawType type, double mean, double std);
void launch_exponential(const DrawArgs& args, DrawType type, double scale);
void launch_integer(const DrawArgs& args, DrawType type, int64_t smallest, uint64_t span);

}  // namespace gpipe_fast
