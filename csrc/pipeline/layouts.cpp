#include "pipeline/layouts.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>

namespace gpipe_fast {

Layouts layouts_of(const Tensors& tensors) {
  Layouts layouts;
  for (const at::Tensor& tensor : tensors) {
    auto& layout = layouts.emplace_back();
    if (tensor.defined()) layout = Layout::of(tensor);
  }
  return layouts;
}

bool layouts_match(const Layouts& layouts, const Tensors& tensors) {
  return std::equal(layouts.begin(), layouts.end(), tensors.begin(), tensors.end(),
                    [](const std::optional<Layout>& layout, const at::Tensor& tensor) {
                      return layout.has_value() == tensor.defined() && (!layout || layout->matches(tensor));
                    });
}

std::optional<Tensors> zeros_with_layouts(const Layouts& layouts, at::Device device) {
  Tensors made;
  for (const std::optional<Layout>& layout : layouts) {
    at::Tensor& tensor = made.emplace_back();
    if (!layout) continue;
    tensor = layout->empty(device);
    if (tensor.numel() > 0 && !unexpanded(tensor).is_non_overlapping_and_dense()) return std::nullopt;
    unexpanded(tensor).zero_();
  }
  return made;
}

at::Tensor empty_with_strides(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !unexpanded(tensor).is_non_overlapping_and_dense())
    return at::empty_like(tensor);
  return Layout::of(tensor).empty(tensor.device());
}

}  // namespace gpipe_fast
