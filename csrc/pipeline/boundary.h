// What crosses boundaries between runs of layers: tensors, how they are nested, and skip connections.
#pragma once

#include "device/stream.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace gpipe_fast {

using Tensors = std::vector<at::Tensor>;

// At a place that may not be there yet.
inline void put(Tensors& tensors, int64_t index, at::Tensor tensor) {
  if (static_cast<size_t>(index) >= tensors.size()) tensors.resize(index + 1);
  tensors[index] = std::move(tensor);
}

// An object of Python's, handed through; whoever lets go of it last takes the GIL.
using Opaque = std::shared_ptr<void>;

// How the tensors at a boundary are nested, and which of them need gradients.
struct Form {
  Opaque structure;  // equal ones are the same object, but for those not seen for long
  std::vector<bool> needs_gradient;
  // Of skip connections, whose tensors come after the others: which need gradients; nothing for None.
  std::vector<std::optional<bool>> skips = {};
};

// What crosses into a run of layers, or out of it, for one micro-batch.
struct Boundary {
  Tensors tensors;
  std::shared_ptr<const Form> form;
};

// A skip connection of one micro-batch: what one layer stashes and a later one pops. It belongs to no stage: whoever
// stashes puts it here, whoever pops takes it out, and with the gradient it is the other way round.
struct Skip {
  at::Tensor tensor;  // undefined for None
  bool needs_gradient = false;
  at::Tensor gradient = {};
  int32_t stage = 0;  // that put here what there is last, and when
  Moment made = {};
};
using Skips = std::vector<Skip>;  // by number

}  // namespace gpipe_fast
