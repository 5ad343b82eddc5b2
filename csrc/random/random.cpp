// Keyed random ops: each draw is a deterministic function of its arguments. It is bitwise the same when it is
// recomputed, moved to another stage, or run with another number of threads.
//
//   Philox key      = mini-batch key (64 bits)
//   Philox counter  = ( block, low 32 bits | block, high 32 bits | micro-batch |
//                       (first_layer + layer) << 16 | ordinal )
//
// An element's index in contiguous order selects its words; see random.h for the mapping.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "random/philox.h"
#include "random/random.h"
#include "random/random_parameters.h"

namespace gpipe_fast {
namespace {

constexpr int64_t kTileBlocks = 256;  // 4 KiB of words, which fit in the L1 cache
constexpr int64_t kTileWords = kTileBlocks * kWordsPerBlock;
// Grain size: with fewer tiles, starting a second thread costs more than it saves.
constexpr int64_t kParallelTiles = 256;

PhiloxStream make_stream(const at::Tensor& key, int64_t layer, int64_t ordinal) {
  check_key(key);
  const int64_t* values = key.const_data_ptr<int64_t>();
  const int64_t microbatch = values[1];
  const int64_t absolute_layer = layer == kNoLayer ? kNoLayer : values[2] + layer;
  TORCH_CHECK_VALUE(microbatch >= 0 && microbatch <= 0xFFFFFFFF, "microbatch must fit 32 bits, but got ",
                    microbatch);
  TORCH_CHECK_VALUE(absolute_layer >= 0 && absolute_layer <= kNoLayer, "layer must fit 16 bits, but got ",
                    absolute_layer);
  check_ordinal(ordinal);
  return {static_cast<uint64_t>(values[0]), static_cast<uint32_t>(microbatch),
          static_cast<uint32_t>(absolute_layer << 16 | ordinal)};
}

// Allocates and fills the output on the CPU, then copies it if `device` is another one. On meta, only allocates.
template <typename Fill>
at::Tensor draw_on_cpu(at::IntArrayRef size, at::ScalarType dtype, at::Device device, const Fill& fill) {
  at::Tensor out =
      at::empty(size, at::TensorOptions().dtype(dtype).device(device.is_meta() ? device : at::kCPU));
  if (device.is_meta()) {
    return out;
  }
  fill(out);
  return device.is_cpu() ? out : out.to(device);
}

// Calls fill(words, offset, count) for every tile of the output: `count` elements starting at `offset`. The
// tiles depend only on the size, never on the number of threads.
template <typename Fill>
void for_each_tile(const PhiloxStream& stream, int64_t numel, int64_t elements_per_block, const Fill& fill) {
  const int64_t tile = kTileBlocks * elements_per_block;
  at::parallel_for(0, at::divup(numel, tile), kParallelTiles, [&](int64_t begin, int64_t end) {
    alignas(64) uint32_t words[kTileWords];
    for (int64_t index = begin; index < end; ++index) {
      const int64_t offset = index * tile;
      const int64_t count = std::min(tile, numel - offset);
      philox_blocks(stream, static_cast<uint64_t>(index * kTileBlocks), at::divup(count, elements_per_block),
                    words);
      fill(words, offset, count);
    }
  });
}

// The type of a draw: float and double are drawn in their own precision, the 16-bit types in float and then rounded.
template <typename T>
using draw_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Fills out with loop(words, count, values), tile by tile.
template <typename T, typename Loop>
void fill_as(at::Tensor& out, const PhiloxStream& stream, const Loop& loop) {
  constexpr int64_t kPerBlock = std::is_same_v<T, double> ? 2 : 4;
  T* data = out.mutable_data_ptr<T>();
  for_each_tile(stream, out.numel(), kPerBlock, [=](const uint32_t* words, int64_t offset, int64_t count) {
    if constexpr (std::is_same_v<T, draw_t<T>>) {
      if (count % 2 == 0) {
        loop(words, count, data + offset);
        return;
      }
    }
    // normal_loop writes pairs, so an odd count goes through a buffer.
    alignas(64) draw_t<T> values[kTileBlocks * kPerBlock];
    loop(words, count, values);
    std::copy_n(values, count, data + offset);
  });
}

template <typename Loop>
void fill_floating(at::Tensor& out, const PhiloxStream& stream, const Loop& loop) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "keyed_draw",
                                  [&] { fill_as<scalar_t>(out, stream, loop); });
}

at::Tensor keyed_bernoulli(const at::Tensor& key, int64_t layer, int64_t ordinal, at::IntArrayRef size,
                           double p, at::ScalarType dtype, at::Device device) {
  const uint64_t threshold = bernoulli_threshold(p);
  const PhiloxStream stream = make_stream(key, layer, ordinal);
  return draw_on_cpu(size, dtype, device, [&](at::Tensor& out) {
    if (threshold == 0) {
      out.zero_();
      return;
    }
    const uint64_t one = bits_of_one(dtype);
    const int64_t itemsize = static_cast<int64_t>(out.element_size());
    char* data = static_cast<char*>(out.mutable_data_ptr());
    for_each_tile(stream, out.numel(), 4, [&](const uint32_t* words, int64_t offset, int64_t count) {
      bernoulli_loop(words, count, static_cast<uint32_t>(threshold - 1), one, itemsize,
                     data + offset * itemsize);
    });
  });
}

at::Tensor keyed_uniform(const at::Tensor& key, int64_t layer, int64_t ordinal, at::IntArrayRef size,
                         double low, double high, at::ScalarType dtype, at::Device device) {
  const auto [limit, digits] = uniform_bound(dtype, low, high);
  const PhiloxStream stream = make_stream(key, layer, ordinal);
  return draw_on_cpu(size, dtype, device, [&, limit = limit, digits = digits](at::Tensor& out) {
    fill_floating(out, stream, [&](const uint32_t* words, int64_t count, auto* values) {
      using value_t = std::remove_pointer_t<decltype(values)>;
      uniform_loop(words, count, digits, static_cast<value_t>(low), static_cast<value_t>(high),
                   static_cast<value_t>(limit), values);
    });
  });
}

at::Tensor keyed_normal(const at::Tensor& key, int64_t layer, int64_t ordinal, at::IntArrayRef size,
                        double mean, double std, at::ScalarType dtype, at::Device device) {
  check_std(std);
  const PhiloxStream stream = make_stream(key, layer, ordinal);
  return draw_on_cpu(size, dtype, device, [&](at::Tensor& out) {
    fill_floating(out, stream, [&](const uint32_t* words, int64_t count, auto* values) {
      using value_t = std::remove_pointer_t<decltype(values)>;
      normal_loop(words, count, static_cast<value_t>(mean), static_cast<value_t>(std), values);
    });
  });
}

at::Tensor keyed_exponential(const at::Tensor& key, int64_t layer, int64_t ordinal, at::IntArrayRef size,
                             double rate, at::ScalarType dtype, at::Device device) {
  check_rate(rate);
  const PhiloxStream stream = make_stream(key, layer, ordinal);
  return draw_on_cpu(size, dtype, device, [&](at::Tensor& out) {
    fill_floating(out, stream, [&](const uint32_t* words, int64_t count, auto* values) {
      using value_t = std::remove_pointer_t<decltype(values)>;
      exponential_loop(words, count, static_cast<value_t>(1.0 / rate), values);
    });
  });
}

at::Tensor keyed_integer(const at::Tensor& key, int64_t layer, int64_t ordinal, at::IntArrayRef size,
                         int64_t smallest, int64_t largest, at::ScalarType dtype, at::Device device) {
  const uint64_t span = num_integers(smallest, largest);
  const PhiloxStream stream = make_stream(key, layer, ordinal);
  return draw_on_cpu(size, dtype, device, [&](at::Tensor& out) {
    AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, dtype, "keyed_integer", [&] {
      scalar_t* data = out.mutable_data_ptr<scalar_t>();
      for_each_tile(stream, out.numel(), 2, [&](const uint32_t* words, int64_t offset, int64_t count) {
        int64_t values[kTileBlocks * 2];
        integer_loop(words, count, smallest, span, values);
        for (int64_t i = 0; i < count; ++i) {
          data[offset + i] = static_cast<scalar_t>(values[i]);
        }
      });
    });
  });
}

// For tests: computes one block at any counter, with the loop that all draws use.
at::Tensor philox_block(int64_t key, at::IntArrayRef counter) {
  TORCH_CHECK_VALUE(counter.size() == 4, "counter must be four 32-bit words, but got ", counter);
  uint32_t words[kWordsPerBlock * kLanes];
  const PhiloxStream stream{static_cast<uint64_t>(key), static_cast<uint32_t>(counter[2]),
                            static_cast<uint32_t>(counter[3])};
  philox_blocks(stream, static_cast<uint64_t>(counter[1]) << 32 | static_cast<uint32_t>(counter[0]), 1,
                words);
  at::Tensor out = at::empty({kWordsPerBlock}, at::kLong);
  std::copy_n(words, kWordsPerBlock, out.mutable_data_ptr<int64_t>());
  return out;
}

TORCH_LIBRARY_FRAGMENT(gpipe_fast, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "keyed_bernoulli(Tensor key, int layer, int ordinal, SymInt[] size, float p, *, ScalarType dtype, "
      "Device device)"
      " -> Tensor",
      tags);
  m.def(
      "keyed_uniform(Tensor key, int layer, int ordinal, SymInt[] size, float low, float high, *, ScalarType "
      "dtype, "
      "Device device) -> Tensor",
      tags);
  m.def(
      "keyed_normal(Tensor key, int layer, int ordinal, SymInt[] size, float mean, float std, *, ScalarType "
      "dtype, "
      "Device device) -> Tensor",
      tags);
  m.def(
      "keyed_exponential(Tensor key, int layer, int ordinal, SymInt[] size, float rate, *, ScalarType dtype, "
      "Device device) -> Tensor",
      tags);
  m.def(
      "keyed_integer(Tensor key, int layer, int ordinal, SymInt[] size, int smallest, int largest, *, "
      "ScalarType dtype, "
      "Device device) -> Tensor",
      tags);
  m.def("philox_block(int key, int[4] counter) -> Tensor");
}

// The key's device selects the backend: kernels for another device register under that device's dispatch key.
TORCH_LIBRARY_IMPL(gpipe_fast, CPU, m) {
  m.impl("keyed_bernoulli", &keyed_bernoulli);
  m.impl("keyed_uniform", &keyed_uniform);
  m.impl("keyed_normal", &keyed_normal);
  m.impl("keyed_exponential", &keyed_exponential);
  m.impl("keyed_integer", &keyed_integer);
}

TORCH_LIBRARY_IMPL(gpipe_fast, CompositeExplicitAutograd, m) { m.impl("philox_block", &philox_block); }

}  // namespace
}  // namespace gpipe_fast
