// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random words that
// are a pure function of a key and a counter. Plain C++, no torch.
#pragma once

#include <cstdint>

// Macros around loops that are compiled for several instruction sets; the best variant is selected when the
// library is loaded. Products and sums are never contracted to fused multiply-adds, so that every instruction
// set computes the same bits. The macros also undo -fwrapv, Python's flag for extensions: with it an index
// such as 2 * i + 1 prevents vectorization.
//
// On a GPU each thread runs a loop for one block of words; the compiler flag --fmad=false prevents contraction there.
#if defined(__CUDACC__)
#define GPIPE_FAST_BEGIN_LOOPS
#define GPIPE_FAST_END_LOOPS
#elif defined(__GNUC__) && !defined(__clang__)
#define GPIPE_FAST_BEGIN_LOOPS         \
  _Pragma("GCC push_options") _Pragma( \
      "GCC optimize(\"O3\", \"fp-contract=off\", \"no-math-errno\", \"no-wrapv\", \"no-trapping-math\")")
#define GPIPE_FAST_END_LOOPS _Pragma("GCC pop_options")
#else
#define GPIPE_FAST_BEGIN_LOOPS _Pragma("STDC FP_CONTRACT OFF")
#define GPIPE_FAST_END_LOOPS
#endif

#if defined(__CUDACC__)
#define GPIPE_FAST_LOOP __device__
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define GPIPE_FAST_AVX512
#define GPIPE_FAST_LOOP __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define GPIPE_FAST_LOOP
#endif

// For loops that would not gain from several instruction sets.
#if defined(__CUDACC__)
#define GPIPE_FAST_PLAIN_LOOP __device__
#define GPIPE_FAST_UNROLL_10 _Pragma("unroll")
#else
#define GPIPE_FAST_PLAIN_LOOP
#define GPIPE_FAST_UNROLL_10 _Pragma("GCC unroll 10")
#endif

#if defined(__CUDACC__)
#define GPIPE_FAST_INLINE __device__ __forceinline__
#elif defined(__GNUC__)
#define GPIPE_FAST_INLINE inline __attribute__((always_inline))
#else
#define GPIPE_FAST_INLINE inline
#endif

namespace gpipe_fast {

constexpr int64_t kWordsPerBlock = 4;

// Selects one stream of blocks: the key, and the upper half of the counter. The lower half counts the blocks.
struct PhiloxStream {
  uint64_t key;
  uint32_t counter2;
  uint32_t counter3;
};

GPIPE_FAST_BEGIN_LOOPS

constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kKeyStep0 = 0x9E3779B9, kKeyStep1 = 0xBB67AE85;
constexpr int kRounds = 10;
constexpr int64_t kLanes = 8;  // blocks that one iteration of the widest loop computes

GPIPE_FAST_LOOP static void philox_blocks_portable(const PhiloxStream& stream, uint64_t first_block,
                                                   int64_t num_blocks, uint32_t* __restrict__ words) {
  const uint32_t first_low = static_cast<uint32_t>(first_block);
  const uint32_t high = static_cast<uint32_t>(first_block >> 32);
  const uint32_t counter2 = stream.counter2, counter3 = stream.counter3;
  const uint32_t key0 = static_cast<uint32_t>(stream.key), key1 = static_cast<uint32_t>(stream.key >> 32);
  const int32_t count = static_cast<int32_t>(num_blocks);
  for (int32_t i = 0; i < count; ++i) {
    uint32_t c0 = first_low + static_cast<uint32_t>(i), c1 = high, c2 = counter2, c3 = counter3;
    uint32_t k0 = key0, k1 = key1;
    GPIPE_FAST_UNROLL_10
    for (int round = 0; round < kRounds; ++round, k0 += kKeyStep0, k1 += kKeyStep1) {
      const uint64_t product0 = uint64_t{kMultiplier0} * c0;
      const uint64_t product1 = uint64_t{kMultiplier1} * c2;
      c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
      c1 = static_cast<uint32_t>(product1);
      c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
      c3 = static_cast<uint32_t>(product0);
    }
    words[kWordsPerBlock * i + 0] = c0;
    words[kWordsPerBlock * i + 1] = c1;
    words[kWordsPerBlock * i + 2] = c2;
    words[kWordsPerBlock * i + 3] = c3;
  }
}

#ifdef GPIPE_FAST_AVX512
// GCC warns of operands that its own intrinsics leave undefined on purpose (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
// The same function with each word in the lower half of a 64-bit lane, so that products need no shuffles; the
// compiler's code for the loop above needs them. The upper halves hold leftovers that no product reads.
__attribute__((target("avx512f"))) static void philox_blocks_avx512(const PhiloxStream& stream,
                                                                    uint64_t first_block, int64_t num_blocks,
                                                                    uint32_t* words) {
  constexpr int kXor3 = 0x96;
  const __m512i multiplier0 = _mm512_set1_epi64(kMultiplier0), multiplier1 = _mm512_set1_epi64(kMultiplier1);
  const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i first_half = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i second_half = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  for (int64_t i = 0; i < num_blocks; i += kLanes) {
    __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(first_block) + i), lane);
    __m512i c1 = _mm512_set1_epi64(static_cast<int64_t>(first_block >> 32));
    __m512i c2 = _mm512_set1_epi64(stream.counter2), c3 = _mm512_set1_epi64(stream.counter3);
    uint32_t k0 = static_cast<uint32_t>(stream.key), k1 = static_cast<uint32_t>(stream.key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < kRounds; ++round, k0 += kKeyStep0, k1 += kKeyStep1) {
      const __m512i product0 = _mm512_mul_epu32(c0, multiplier0);
      const __m512i product1 = _mm512_mul_epu32(c2, multiplier1);
      c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product1, 32), c1, _mm512_set1_epi64(k0), kXor3);
      c1 = product1;
      c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product0, 32), c3, _mm512_set1_epi64(k1), kXor3);
      c3 = product0;
    }
    const __m512i pair0 = _mm512_mask_blend_epi32(0xAAAA, c0, _mm512_slli_epi64(c1, 32));
    const __m512i pair1 = _mm512_mask_blend_epi32(0xAAAA, c2, _mm512_slli_epi64(c3, 32));
    uint32_t* out = words + kWordsPerBlock * i;
    _mm512_storeu_si512(out, _mm512_permutex2var_epi64(pair0, first_half, pair1));
    _mm512_storeu_si512(out + 2 * kLanes, _mm512_permutex2var_epi64(pair0, second_half, pair1));
  }
}
#pragma GCC diagnostic pop
#endif

#if !defined(__CUDACC__)
// Writes blocks first_block .. first_block + num_blocks - 1, four words each. The lower 32 bits of the block
// index must not overflow within one call; `words` has room for a multiple of kLanes blocks.
inline void philox_blocks(const PhiloxStream& stream, uint64_t first_block, int64_t num_blocks,
                          uint32_t* words) {
#ifdef GPIPE_FAST_AVX512
  if (__builtin_cpu_supports("avx512f")) {
    return philox_blocks_avx512(stream, first_block, num_blocks, words);
  }
#endif
  philox_blocks_portable(stream, first_block, num_blocks, words);
}
#endif

GPIPE_FAST_END_LOOPS

}  // namespace gpipe_fast
