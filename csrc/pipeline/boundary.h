// Boundary tensors, which cross from one segment to the next: tensors, their nesting, and skip connections.
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

// Stores a tensor at `index`, and grows the vector if needed.
inline void store_at(Tensors& tensors, int64_t index, at::Tensor tensor) {
  if (static_cast<size_t>(index) >= tensors.size()) tensors.resize(index + 1);
  tensors[index] = std::move(tensor);
}

// A Python object, opaque to C++. Releasing the last reference acquires the GIL.
using PythonObject = std::shared_ptr<void>;

// The form of boundary tensors: how they are nested, and which of them need gradients. It has no sizes.
struct BoundaryForm {
  PythonObject structure;  // interned in an LRU cache: equal structures are nearly always the same object
  std::vector<bool> needs_gradient;
  // Skip tensors, which follow the other tensors: whether each needs a gradient; nullopt for None.
  std::vector<std::optional<bool>> skips = {};
};

// The boundary tensors that enter or leave a segment, for one micro-batch.
struct Boundary {
  Tensors tensors;
  std::shared_ptr<const BoundaryForm> form;
};

// A skip connection of one micro-batch: one layer stashes a tensor and a later layer pops it. It belongs to no
// stage: in the forward the stash stores the tensor here and the pop takes it; in the backward the pop stores its
// gradient here and the stash takes it.
struct Skip {
  at::Tensor tensor;  // undefined for None
  bool needs_gradient = false;
  at::Tensor gradient = {};
  int32_t stage = 0;       // the stage that last stored the tensor or gradient
  StreamEvent ready = {};  // stream event after it was computed
};
using Skips = std::vector<Skip>;  // by index of the skip connection

}  // namespace gpipe_fast
