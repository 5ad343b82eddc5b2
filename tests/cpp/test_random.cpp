// Tests the loops of keyed random draws, without torch and under sanitizers: published test vectors, bitwise equality
// between instruction sets, and no out-of-bounds writes.
#include "expect.h"
#include "random/random.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace gpipe_fast;

namespace {

// Known-answer tests of Random123 (kat_vectors): counter, key, result.
void test_philox_matches_published_vectors() {
  struct Vector {
    uint32_t counter[4], key[2], result[4];
  };
  const Vector vectors[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Vector& v : vectors) {
    const PhiloxStream stream{uint64_t{v.key[1]} << 32 | v.key[0], v.counter[2], v.counter[3]};
    uint32_t words[kWordsPerBlock * kLanes];
    philox_blocks(stream, uint64_t{v.counter[1]} << 32 | v.counter[0], 1, words);
    for (int i = 0; i < 4; ++i) CHECK(words[i] == v.result[i]);
  }
}

void test_instruction_sets_are_bitwise_equal() {
  const PhiloxStream stream{0x123456789abcdef0, 7, 9};
  for (int64_t blocks : {1, 7, 8, 9, 64, 255}) {
    const int64_t room = (blocks + kLanes - 1) / kLanes * kLanes * kWordsPerBlock;
    std::vector<uint32_t> best(room), portable(room);
    philox_blocks(stream, 3, blocks, best.data());
    philox_blocks_portable(stream, 3, blocks, portable.data());
    for (int64_t i = 0; i < blocks * kWordsPerBlock; ++i) CHECK(best[i] == portable[i]);
  }
}

void test_draws_are_in_the_range_of_their_distribution() {
  const int64_t count = 4096;
  std::vector<uint32_t> words(count);
  philox_blocks({42, 0, 0}, 0, count / kWordsPerBlock, words.data());
  std::vector<float> values(count);
  uniform_loop(words.data(), count, 24, 0.0f, 1.0f, std::nextafter(1.0f, 0.0f), values.data());
  for (float value : values) CHECK(value >= 0.0f && value < 1.0f);
  exponential_loop(words.data(), count, 1.0f, values.data());
  for (float value : values) CHECK(value > 0.0f && std::isfinite(value));
  normal_loop(words.data(), count, 0.0f, 1.0f, values.data());
  double sum = 0, squares = 0;
  for (float value : values) {
    CHECK(std::isfinite(value));
    sum += value;
    squares += double{value} * value;
  }
  CHECK(std::abs(sum / count) < 4 / std::sqrt(double{count}));
  CHECK(std::abs(squares / count - 1) < 4 * std::sqrt(2.0 / count));
}

// Checks that every loop writes exactly `count` elements; a normal draw of an odd count writes one more, which callers
// allocate.
void test_loops_write_exactly_count_elements() {
  std::vector<uint32_t> words(256);
  philox_blocks({1, 2, 3}, 0, 64, words.data());
  for (int64_t count = 1; count <= 65; ++count) {
    std::vector<float> exact(count);
    exponential_loop(words.data(), count, 1.0f, exact.data());
    uniform_loop(words.data(), count, 24, 0.0f, 1.0f, 0.99f, exact.data());
    std::vector<uint8_t> mask(count);
    bernoulli_loop(words.data(), count, 0x7fffffff, 1, 1, mask.data());
    std::vector<float> pairs((count + 1) / 2 * 2);
    normal_loop(words.data(), count, 0.0f, 1.0f, pairs.data());
  }
}

}  // namespace

int main() {
  test_philox_matches_published_vectors();
  test_instruction_sets_are_bitwise_equal();
  test_draws_are_in_the_range_of_their_distribution();
  test_loops_write_exactly_count_elements();
  std::puts("4 passed, 0 failed");
}
