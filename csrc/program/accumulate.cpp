// The schemas of gpipe_fast::accumulate_ and gpipe_fast::_accumulate_, the checks, and all kernels except CUDA's.
#include "program/accumulate.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <c10/core/ScalarType.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"

namespace gpipe_fast {

void check_pairs(at::TensorList accumulators, at::TensorList gradients) {
  GPIPE_CHECK_ARG(accumulators.size() == gradients.size(), "accumulate_: ", accumulators.size(),
                  " accumulators, but ", gradients.size(), " gradients");
  for (size_t i = 0; i < accumulators.size(); ++i) {
    const at::Tensor& accumulator = accumulators[i];
    const at::Tensor& gradient = gradients[i];
    GPIPE_CHECK_ARG(accumulator.sym_sizes() == gradient.sym_sizes(), "accumulate_: accumulator ", i,
                    " has shape ", accumulator.sym_sizes(), ", but its gradient ", gradient.sym_sizes());
    GPIPE_CHECK_ARG(
        accumulator.device() == gradient.device() && accumulator.device() == accumulators[0].device(),
        "accumulate_: accumulator ", i, " is on ", accumulator.device(), ", its gradient on ",
        gradient.device(), ", accumulator 0 on ", accumulators[0].device());
    GPIPE_CHECK_ARG(c10::canCast(gradient.scalar_type(), accumulator.scalar_type()),
                    "accumulate_: a gradient of dtype ", gradient.scalar_type(),
                    " does not cast to accumulator ", i, " of dtype ", accumulator.scalar_type());
  }
}

namespace {

struct Span {
  std::uintptr_t begin;
  std::uintptr_t end;
  size_t index;
};

// Returns the bytes from the start of the first element to the end of the last one; an empty span for an empty tensor.
Span span_of(const at::Tensor& tensor, size_t index) {
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {begin, begin, index};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + static_cast<std::uintptr_t>((last + 1) * tensor.element_size()), index};
}

}  // namespace

void check_disjoint(at::TensorList accumulators, at::TensorList gradients) {
  std::vector<Span> spans;
  spans.reserve(accumulators.size());
  for (size_t i = 0; i < accumulators.size(); ++i) {
    const Span span = span_of(accumulators[i], i);
    if (span.begin < span.end) spans.push_back(span);
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t k = 1; k < spans.size(); ++k) {
    GPIPE_CHECK_ARG(spans[k - 1].end <= spans[k].begin, "accumulate_: accumulators ", spans[k - 1].index,
                    " and ", spans[k].index, " share memory");
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    const Span span = span_of(gradients[i], i);
    if (span.begin == span.end) continue;
    const auto next = std::upper_bound(spans.begin(), spans.end(), span.begin,
                                       [](std::uintptr_t begin, const Span& s) { return begin < s.end; });
    GPIPE_CHECK_ARG(next == spans.end() || next->begin >= span.end, "accumulate_: gradient ", i,
                    " shares memory with accumulator ", next->index);
  }
}

namespace {

// The kernel for every device; CUDA overrides it.
void add_one_by_one(at::TensorList accumulators, at::TensorList gradients) {
  for (size_t i = 0; i < accumulators.size(); ++i) accumulators[i].add_(gradients[i]);
}

void accumulate_checked(at::TensorList accumulators, at::TensorList gradients) {
  check_pairs(accumulators, gradients);
  check_disjoint(accumulators, gradients);
  add_one_by_one(accumulators, gradients);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gpipe_fast, m) {
  m.def("accumulate_(Tensor(a!)[] accumulators, Tensor[] gradients) -> ()");
  m.def("_accumulate_(Tensor(a!)[] accumulators, Tensor[] gradients) -> ()");
}

// This dispatch key also serves empty lists, which have no device.
TORCH_LIBRARY_IMPL(gpipe_fast, CompositeExplicitAutograd, m) {
  m.impl("accumulate_", &accumulate_checked);
  m.impl("_accumulate_", &add_one_by_one);
}
TORCH_LIBRARY_IMPL(gpipe_fast, CPU, m) { m.impl("_accumulate_", &add_one_by_one); }
TORCH_LIBRARY_IMPL(gpipe_fast, Meta, m) { m.impl("accumulate_", &check_pairs); }

void accumulate_unchecked(at::TensorList accumulators, at::TensorList gradients) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gpipe_fast::_accumulate_", "")
                             .typed<void(at::TensorList, at::TensorList)>();
  op.call(accumulators, gradients);
}

}  // namespace gpipe_fast
