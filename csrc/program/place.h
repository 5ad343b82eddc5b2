// Offsets in one block of memory for values with known live ranges.
#pragma once

#include <cstdint>
#include <vector>

namespace gpipe_fast {

struct LiveRange {
  int64_t bytes;
  int64_t begin;  // the step that first writes the value
  int64_t end;    // the last step that reads it
};

struct Placement {
  std::vector<int64_t> offsets;  // by live range
  int64_t bytes = 0;             // of the block
};

// Gives each value the lowest free offset, in order of decreasing size (first fit decreasing). Sizes are rounded up to
// a multiple of the alignment, in bytes.
Placement place(const std::vector<LiveRange>& ranges, int64_t alignment);

}  // namespace gpipe_fast
