// Tests the loops of keyed random draws, without torch and under sanitizers: bitwise equality between instruction
// sets, and no out-of-bounds writes.
#include "expect.h"
#include "random/random.h"

#include <cstdint>
#include <cstdio>
#include <vector>

using namespace gpipe_fast;

namespace {

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
  test_instruction_sets_are_bitwise_equal();
  test_loops_write_exactly_count_elements();
  std::puts("2 passed, 0 failed");
}
