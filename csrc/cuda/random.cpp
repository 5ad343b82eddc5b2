// The CUDA backend of the keyed random ops. The dispatcher selects it if the key is on a GPU.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "check.h"
#include "cuda/random_kernel.h"
#include "random/random_parameters.h"

namespace gpipe_fast {
namespace {

DrawType draw_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DrawType::kFloat32;
    case at::kHalf:
      return DrawType::kFloat16;
    case at::kBFloat16:
      return DrawType::kBFloat16;
    case at::kDouble:
      return DrawType::kFloat64;
    case at::kChar:
      return DrawType::kInt8;
    case at::kShort:
      return DrawType::kInt16;
    case at::kInt:
      return DrawType::kInt32;
    case at::kLong:
      return DrawType::kInt64;
    case at::kByte:
      return DrawType::kUint8;
    case at::kBool:
      return DrawType::kBool;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "keyed random ops do not support ", dtype, " on a GPU");
  }
}

// Allocates the output on the key's device, launches the kernel there, and copies the output if `device` is
// another one.
template <typename Launch>
at::Tensor draw(const at::Tensor& key, int64_t layer, int64_t ordinal, at::IntArrayRef size,
                at::ScalarType dtype, at::Device device, const Launch& launch) {
  check_key(key);
  check_ordinal(ordinal);
  TORCH_CHECK_VALUE(layer >= 0 && layer <= kNoLayer, "layer must fit 16 bits, but got ", layer);
  const c10::cuda::CUDAGuard guard(key.device());
  at::Tensor out = at::empty(size, at::TensorOptions().dtype(dtype).device(key.device()));
  if (out.numel() > 0) {
    launch(DrawArgs{out.mutable_data_ptr(), out.numel(), key.const_data_ptr<int64_t>(), layer, ordinal,
                    c10::cuda::getCurrentCUDAStream()});
  }
  return device == key.device() ? out : out.to(device);
}

at::Tensor keyed_bernoulli(const at::Tensor& key, int64_t layer, int64_t ordinal, at::IntArrayRef size,
                           double p, at::ScalarType dtype, at::Device device) {
  const uint64_t threshold = bernoulli_threshold(p), one = bits_of_one(dtype);
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  return draw(key, layer, ordinal, size, dtype, device, [&](const DrawArgs& args) {
    // `threshold` must not be 0, so for p = 0 the pattern of one is replaced by zero.
    launch_bernoulli(args, threshold == 0 ? 1 : threshold, threshold == 0 ? 0 : one, itemsize);
  });
}

at::Tensor keyed_uniform(const at::Tensor& key, int64_t layer, int64_t ordinal, at::IntArrayRef size,
                         double low, double high, at::ScalarType dtype, at::Device device) {
  const UniformBound end = uniform_bound(dtype, low, high);
  return draw(key, layer, ordinal, size, dtype, device, [&](const DrawArgs& args) {
    launch_uniform(args, draw_type(dtype), end.digits, low, high, end.limit);
  });
}

at::Tensor keyed_normal(const at::Tensor& key, int64_t layer, int64_t ordinal, at::IntArrayRef size,
                        double mean, double std, at::ScalarType dtype, at::Device device) {
  check_std(std);
  return draw(key, layer, ordinal, size, dtype, device,
              [&](const DrawArgs& args) { launch_normal(args, draw_type(dtype), mean, std); });
}

at::Tensor keyed_exponential(const at::Tensor& key, int64_t layer, int64_t ordinal, at::IntArrayRef size,
                             double rate, at::ScalarType dtype, at::Device device) {
  check_rate(rate);
  return draw(key, layer, ordinal, size, dtype, device,
              [&](const DrawArgs& args) { launch_exponential(args, draw_type(dtype), 1.0 / rate); });
}

at::Tensor keyed_integer(const at::Tensor& key, int64_t layer, int64_t ordinal, at::IntArrayRef size,
                         int64_t smallest, int64_t largest, at::ScalarType dtype, at::Device device) {
  const uint64_t span = num_integers(smallest, largest);
  return draw(key, layer, ordinal, size, dtype, device,
              [&](const DrawArgs& args) { launch_integer(args, draw_type(dtype), smallest, span); });
}

TORCH_LIBRARY_IMPL(gpipe_fast, CUDA, m) {
  m.impl("keyed_bernoulli", &keyed_bernoulli);
  m.impl("keyed_uniform", &keyed_uniform);
  m.impl("keyed_normal", &keyed_normal);
  m.impl("keyed_exponential", &keyed_exponential);
  m.impl("keyed_integer", &keyed_integer);
}

}  // namespace
}  // namespace gpipe_fast
