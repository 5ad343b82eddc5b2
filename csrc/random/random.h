// Loops that turn Philox words into draws of each distribution, written for vectorization. Plain C++, no torch.
//
// A block of four words gives four elements of a 32-bit draw, or two of a 64-bit draw:
//
//   words      w0  w1  w2  w3 | w4  w5  w6  w7 | ...
//   32 bits    e0  e1  e2  e3 | e4  e5  e6  e7 |
//   64 bits    e0      e1     | e2      e3     |
//
// A normal draw computes a pair of elements from a pair of uniforms (Box-Muller): e0 and e1 from w0 and w1, and so on.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "random/philox.h"

namespace gpipe_fast {

GPIPE_FAST_BEGIN_LOOPS

// Returns a uniform number in (0, 1], as finely spaced at both ends as the type allows. It is never 0, so
// that its logarithm is finite.
GPIPE_FAST_INLINE float open_uniform(uint32_t word) {
  // AVX2 converts only from signed integers. Splitting the word into halves keeps the result exact to 24 bits.
  const float high = static_cast<float>(static_cast<int32_t>(word >> 16)) * 0x1p-16f;
  const float low = static_cast<float>(static_cast<int32_t>(word & 0xffff)) * 0x1p-32f;
  return (high + low) + 0x1p-33f;
}

GPIPE_FAST_INLINE uint64_t word64(const uint32_t* words, int64_t i) {
  return (uint64_t{words[2 * i + 1]} << 32) | words[2 * i];
}

GPIPE_FAST_INLINE double open_uniform(uint64_t word) {
  return (static_cast<double>(word >> 11) + 0.5) * 0x1p-53;
}

// Returns the natural logarithm of a positive normal number, with the reduction and the polynomial of
// fdlibm's e_logf.c. The error is below 1 ulp. Branch-free, with the same bits on every instruction set.
GPIPE_FAST_INLINE float fast_log(float x) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int32_t exponent = static_cast<int32_t>(bits - kSqrtHalf) >> 23;
  bits -= static_cast<uint32_t>(exponent) << 23;
  float mantissa;  // in [sqrt(1/2), sqrt(2))
  std::memcpy(&mantissa, &bits, sizeof mantissa);
  const float f = mantissa - 1.0f;
  const float k = static_cast<float>(exponent);
  const float s = f / (2.0f + f);
  const float z = s * s;
  const float w = z * z;
  const float even = w * (0.40000972152f + w * 0.24279078841f);
  const float odd = z * (0.66666662693f + w * 0.28498786688f);
  const float half_square = 0.5f * f * f;
  return s * (half_square + (odd + even)) + k * 9.0580006145e-06f - half_square + f + k * 6.9313812256e-01f;
}

// Returns the square root of a non-negative number, by three Newton steps towards its reciprocal; the error
// is below 3 ulp. The compiler would not vectorize std::sqrt, which may set errno.
GPIPE_FAST_INLINE float fast_sqrt(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = 0x5f375a86u - (bits >> 1);
  float y;
  std::memcpy(&y, &bits, sizeof y);
  const float half = 0.5f * x;
  y = y * (1.5f - half * y * y);
  y = y * (1.5f - half * y * y);
  y = y * (1.5f - half * y * y);
  return x * y;
}

// Computes cosine and sine of 2 pi word / 2^32. The quadrant is subtracted in integers, so the reduction is
// exact. The polynomials on [-pi/4, pi/4] are from Cephes' sinf.c; the absolute error is below 1.3e-7.
GPIPE_FAST_INLINE void fast_cos_sin(uint32_t word, float* cosine, float* sine) {
  const uint32_t quadrant = (word + 0x20000000u) >> 30;
  const int32_t rest = static_cast<int32_t>(word - (quadrant << 30));
  const float x = static_cast<float>(rest) * 1.4629180792671596e-09f;  // 2 pi / 2^32
  const float z = x * x;
  const float s = x + x * z * (-1.6666654611e-1f + z * (8.3321608736e-3f + z * -1.9515295891e-4f));
  const float c = 1.0f - 0.5f * z +
                  z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
  const bool swap = (quadrant & 1) != 0;
  const float abs_cosine = swap ? s : c;
  const float abs_sine = swap ? c : s;
  *cosine = ((quadrant + 1) & 2) != 0 ? -abs_cosine : abs_cosine;
  *sine = (quadrant & 2) != 0 ? -abs_sine : abs_sine;
}

// Writes one where word <= last, else zero. `one` is the bit pattern of 1 in the output type, so four loops
// serve all types.
template <typename Bits>
GPIPE_FAST_INLINE void select_one(const uint32_t* words, int64_t count, uint32_t last, uint64_t one,
                                  void* out) {
  Bits* __restrict__ bits = static_cast<Bits*>(out);
  const Bits one_bits = static_cast<Bits>(one);
  const int32_t n = static_cast<int32_t>(count);
  for (int32_t i = 0; i < n; ++i) {
    bits[i] = words[i] <= last ? one_bits : Bits{0};
  }
}

GPIPE_FAST_LOOP static void bernoulli_loop(const uint32_t* words, int64_t count, uint32_t last, uint64_t one,
                                           int64_t itemsize, void* out) {
  switch (itemsize) {
    case 1:
      return select_one<uint8_t>(words, count, last, one, out);
    case 2:
      return select_one<uint16_t>(words, count, last, one, out);
    case 4:
      return select_one<uint32_t>(words, count, last, one, out);
    default:
      return select_one<uint64_t>(words, count, last, one, out);
  }
}

// Computes low + (high - low) u, clamped to `limit`, where u in [0, 1) has `digits` bits.
GPIPE_FAST_LOOP static void uniform_loop(const uint32_t* __restrict__ words, int64_t count, int digits,
                                         float low, float high, float limit, float* __restrict__ out) {
  const float range = high - low;
  const float unit = std::ldexp(1.0f, -digits);
  const int shift = 32 - digits;
  const int32_t n = static_cast<int32_t>(count);
  for (int32_t i = 0; i < n; ++i) {
    const float value = low + range * (static_cast<float>(static_cast<int32_t>(words[i] >> shift)) * unit);
    out[i] = value < limit ? value : limit;
  }
}

GPIPE_FAST_LOOP static void uniform_loop(const uint32_t* __restrict__ words, int64_t count, int, double low,
                                         double high, double limit, double* __restrict__ out) {
  const double range = high - low;
  for (int64_t i = 0; i < count; ++i) {
    const double value =
        low + range * (static_cast<double>(static_cast<int64_t>(word64(words, i) >> 11)) * 0x1p-53);
    out[i] = value < limit ? value : limit;
  }
}

// Writes an even number of elements: if `count` is odd, `out` must have room for one more.
GPIPE_FAST_LOOP static void normal_loop(const uint32_t* __restrict__ words, int64_t count, float mean,
                                        float std, float* __restrict__ out) {
  const int32_t pairs = static_cast<int32_t>((count + 1) / 2);
  for (int32_t i = 0; i < pairs; ++i) {
    const float radius = fast_sqrt(-2.0f * fast_log(open_uniform(words[2 * i]))) * std;
    float cosine, sine;
    fast_cos_sin(words[2 * i + 1], &cosine, &sine);
    out[2 * i] = radius * cosine + mean;
    out[2 * i + 1] = radius * sine + mean;
  }
}

GPIPE_FAST_PLAIN_LOOP static void normal_loop(const uint32_t* words, int64_t count, double mean, double std,
                                              double* out) {
  for (int64_t i = 0; i < (count + 1) / 2; ++i) {
    const double radius = std::sqrt(-2.0 * std::log(open_uniform(word64(words, 2 * i)))) * std;
    const double angle = 6.283185307179586 * open_uniform(word64(words, 2 * i + 1));
    out[2 * i] = radius * std::cos(angle) + mean;
    out[2 * i + 1] = radius * std::sin(angle) + mean;
  }
}

// Computes -log(u) / lambda, clamped above zero: with a zero, p / draw would be infinite in exponential-race sampling.
GPIPE_FAST_LOOP static void exponential_loop(const uint32_t* __restrict__ words, int64_t count, float scale,
                                             float* __restrict__ out) {
  const int32_t n = static_cast<int32_t>(count);
  for (int32_t i = 0; i < n; ++i) {
    const float value = -fast_log(open_uniform(words[i]));
    out[i] = (value > 0x1p-25f ? value : 0x1p-25f) * scale;
  }
}

GPIPE_FAST_PLAIN_LOOP static void exponential_loop(const uint32_t* words, int64_t count, double scale,
                                                   double* out) {
  for (int64_t i = 0; i < count; ++i) {
    const double value = -std::log(open_uniform(word64(words, i)));
    out[i] = (value > 0x1p-54 ? value : 0x1p-54) * scale;
  }
}

// Computes smallest + floor(span u) from the upper 64 bits of a 128-bit product; the bias is below span /
// 2^64. A span of 0 means 2^64.
GPIPE_FAST_PLAIN_LOOP static void integer_loop(const uint32_t* words, int64_t count, int64_t smallest,
                                               uint64_t span, int64_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t word = word64(words, i);
    __extension__ typedef unsigned __int128 uint128;
    const uint64_t offset = span == 0 ? word : static_cast<uint64_t>((uint128{word} * span) >> 64);
    out[i] = static_cast<int64_t>(static_cast<uint64_t>(smallest) + offset);
  }
}

GPIPE_FAST_END_LOOPS

}  // namespace gpipe_fast
