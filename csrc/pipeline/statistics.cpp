#include "pipeline/statistics.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/zeros_like.h>

namespace gpipe_fast {

std::vector<at::Tensor> Statistics::begin(std::vector<at::Tensor>& buffers) const {
  std::vector<at::Tensor> before;
  for (int64_t index : {mean, variance, count}) {
    at::Tensor& buffer = buffers.at(index);
    // A copy, because layers in Python write the module's own buffer.
    before.push_back(buffer.clone());
    buffer = at::zeros_like(buffer);
  }
  return before;
}

// The formula of PyTorch's batch norm (aten/src/ATen/native/Normalization.cpp): running = (1 - f) running + f new,
// where the new variance is the population variance times n / (n - 1). Runs on the device, without synchronizing
// the host.
void Statistics::end(std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& before) const {
  const at::Tensor n = buffers.at(count).to(at::kDouble);
  const at::Tensor was_called = n.gt(0).to(at::kDouble);
  const at::Tensor batches = before[2] + n.gt(0);
  const at::Tensor factor = momentum ? was_called * *momentum : was_called / batches;
  const at::Tensor sample = n / (n - 1);
  const auto update = [&](const at::Tensor& running, const at::Tensor& found) {
    return running * at::rsub(factor, 1) + found * factor;
  };
  buffers[mean] = update(before[0], buffers[mean]);
  buffers[variance] = update(before[1], buffers[variance] * sample);
  buffers[count] = batches;
}

}  // namespace gpipe_fast
