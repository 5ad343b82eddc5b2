// Running statistics of a batch norm, computed over the whole mini-batch instead of each micro-batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gpipe_fast {

// Indices of the statistics among a stage's buffers. While a forward runs, these buffers hold the mean, the
// population variance (not the sample estimate) and the number of the elements seen so far, starting at zero; each
// micro-batch adds its own elements.
struct Statistics {
  int64_t mean, variance, count;
  std::optional<double> momentum;  // nullopt: the average over all mini-batches

  // Replaces the buffers by zeros, and returns copies of their previous values.
  std::vector<at::Tensor> begin(std::vector<at::Tensor>& buffers) const;
  // Replaces the buffers by the module's new values, given the values that begin() returned: the result of one call
  // with the whole mini-batch, or the previous values if the batch norm was not called.
  void end(std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& before) const;
};

}  // namespace gpipe_fast
