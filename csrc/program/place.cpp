#include "program/place.h"

#include <algorithm>
#include <numeric>

namespace gpipe_fast {
namespace {

struct Placed {
  int64_t low, high, begin, end;
};

}  // namespace

Placement place(const std::vector<LiveRange>& ranges, int64_t alignment) {
  std::vector<int64_t> sizes;
  for (const LiveRange& range : ranges) {
    sizes.push_back((std::max<int64_t>(range.bytes, 1) + alignment - 1) / alignment * alignment);
  }
  std::vector<size_t> order(ranges.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return sizes[a] != sizes[b] ? sizes[a] > sizes[b] : ranges[a].begin < ranges[b].begin;
  });

  Placement found;
  found.offsets.resize(ranges.size());
  std::vector<Placed> placed;  // in order of `low`
  for (const size_t index : order) {
    const auto& [bytes, begin, end] = ranges[index];
    int64_t offset = 0;
    for (const Placed& other : placed) {
      if (offset + sizes[index] <= other.low) break;
      if (other.begin <= end && begin <= other.end) offset = std::max(offset, other.high);
    }
    const Placed own{offset, offset + sizes[index], begin, end};
    const auto after = [](const Placed& a, const Placed& b) { return a.low < b.low; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), own, after), own);
    found.offsets[index] = offset;
    found.bytes = std::max(found.bytes, own.high);
  }
  return found;
}

}  // namespace gpipe_fast
