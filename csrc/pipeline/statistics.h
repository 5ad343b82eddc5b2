// Running statistics of a batch norm that come from the whole mini-batch, not from each micro-batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gpipe_fast {

// Where they are among a stage's buffers. While a forward runs, these hold mean, variance (that of the elements, not the
// estimate from a sample) and number of the elements met so far, beginning with zeros; each micro-batch adds its own.
struct Statistics {
  int64_t mean, variance, count;
  std::optional<double> momentum;  // none: the average over all mini-batches

  // Lets the buffers begin with zeros; returns what they were, which is not written when they are.
  std::vector<at::Tensor> begin(std::vector<at::Tensor>& buffers) const;
  // What the module's buffers become, given what they were: as after one call with the whole mini-batch; as they were if
  // the batch norm was not called.
  void end(std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& before) const;
};

}  // namespace gpipe_fast
