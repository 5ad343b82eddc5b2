// Keyed draws on a GPU, with the bits of csrc/random/random.cpp; in double precision the last bits of normal and
// exponential draws may differ.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gpipe_fast {

// Of what is drawn.
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

// Where a draw goes, and from where it comes. The key is read by the kernel, so a captured launch draws anew when it has
// changed; what is out of range in it, which only the host could say, draws something else.
struct DrawTarget {
  void* out;
  int64_t size;
  const int64_t* key;  // [mini-batch key, micro-batch, first layer], on the GPU
  int64_t layer;
  int64_t ordinal;
  cudaStream_t stream;
};

// `one`: its bits, of so many bytes, for words below `ones`, which is not 0.
void launch_bernoulli(const DrawTarget& target, uint64_t ones, uint64_t one, int64_t itemsize);
void launch_uniform(const DrawTarget& target, DrawType type, int digits, double low, double high,
                    double limit);
void launch_normal(const DrawTarget& target, DrawType type, double mean, double std);
void launch_exponential(const DrawTarget& target, DrawType type, double scale);
void launch_integer(const DrawTarget& target, DrawType type, int64_t smallest, uint64_t span);

}  // namespace gpipe_fast
