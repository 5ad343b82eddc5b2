// Checks and derived parameters of the keyed random ops, shared by the CPU and GPU backends.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace gpipe_fast {

// The layer index for random ops outside all layers; see gpipe_fast/randomness/random.py.
constexpr int64_t kNoLayer = 0xFFFF;

inline void check_key(const at::Tensor& key) {
  TORCH_CHECK_VALUE(
      key.scalar_type() == at::kLong && key.dim() == 1 && key.numel() == 3 && key.is_contiguous(),
      "key must be a contiguous int64 tensor [minibatch_key, microbatch, first_layer], but got ",
      key.scalar_type(), " of shape ", key.sizes());
}

inline void check_ordinal(int64_t ordinal) {
  TORCH_CHECK_VALUE(ordinal >= 0 && ordinal <= 0xFFFF,
                    "a layer may hold at most 65536 random ops, but got ordinal ", ordinal);
}

// Returns how many of the 2^32 words give a one: p is rounded to a multiple of 2^-32.
inline uint64_t bernoulli_threshold(double p) {
  TORCH_CHECK_VALUE(p >= 0.0 && p <= 1.0, "p must be in [0, 1], but got ", p);
  return static_cast<uint64_t>(std::llround(p * 0x1p32));
}

// Returns the bit pattern of 1 in `dtype`.
inline uint64_t bits_of_one(at::ScalarType dtype) {
  uint64_t one = 0;
  AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, dtype, "keyed_bernoulli", [&] {
    const scalar_t value = static_cast<scalar_t>(1);
    std::memcpy(&one, &value, sizeof value);
  });
  return one;
}

// `limit`: the largest number of the output type below `high`, because rounding must not reach the open end
// of the range. `digits`: the number of significand bits of the output type.
struct UniformBound {
  double limit;
  int digits;
};
inline UniformBound uniform_bound(at::ScalarType dtype, double low, double high) {
  TORCH_CHECK_VALUE(low <= high, "low must not be above high, but got [", low, ", ", high, ")");
  UniformBound end{high, 0};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "keyed_uniform", [&] {
    const scalar_t lowest = std::numeric_limits<scalar_t>::lowest();
    scalar_t below = static_cast<scalar_t>(high);
    if (static_cast<double>(below) >= high) {
      below = std::nextafter(below, lowest);
    }
    end.limit = std::max(static_cast<double>(below), static_cast<double>(static_cast<scalar_t>(low)));
    end.digits = std::numeric_limits<scalar_t>::digits;
  });
  return end;
}

inline void check_std(double std) {
  TORCH_CHECK_VALUE(std >= 0.0, "std must not be negative, but got ", std);
}

inline void check_rate(double rate) {
  TORCH_CHECK_VALUE(rate > 0.0, "rate must be positive, but got ", rate);
}

// Returns the number of integers in [smallest, largest]; 0 means 2^64.
inline uint64_t num_integers(int64_t smallest, int64_t largest) {
  TORCH_CHECK_VALUE(smallest <= largest, "smallest must not be above largest, but got [", smallest, ", ",
                    largest, "]");
  return static_cast<uint64_t>(largest) - static_cast<uint64_t>(smallest) + 1;
}

}  // namespace gpipe_fast
