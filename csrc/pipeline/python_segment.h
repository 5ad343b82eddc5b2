// A segment whose layers run in Python.
#pragma once

#include "pipeline/segment.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gpipe_fast {

// The layers of a segment. A stage's worker calls them without holding the GIL.
class PythonLayers {
 public:
  virtual ~PythonLayers() = default;
  // snapshot() returns a snapshot of the layers' state before a mini-batch; restore() restores it after a failure.
  virtual PythonObject snapshot() = 0;
  virtual void restore(const PythonObject& snapshot) = 0;
  struct Result {
    Boundary outputs;
    PythonObject kept;  // for the backward
    std::vector<int64_t> written_inputs;
    std::vector<bool> reached;  // by parameter: whether an output depends on it; empty unless requested
  };
  // `key` draws the mini-batch's random key on its first call. `want_reached` requests `Result::reached`.
  virtual Result forward(const Boundary& inputs, const std::function<int64_t()>& key, int32_t microbatch,
                         const std::string& action, bool want_reached) = 0;
  // Takes gradients of the outputs, returns gradients of the inputs, and adds to `gradients`, one for each of the
  // layers' parameters. All of them may be undefined.
  virtual Tensors backward(const PythonObject& kept, const Tensors& tangents, Tensors& gradients, bool retain,
                           const std::string& action) = 0;
};

class PythonSegment final : public Segment {
 public:
  bool is_lowered() const override { return false; }
  std::optional<int64_t> random_key_layer() const override { return std::nullopt; }
  bool accepts_inputs(int64_t layer, const Boundary& boundary, const Skips& skips) const override;
  bool accepts_gradients(const Tensors& tangents) const override { return true; }
  Result forward(const SegmentCall& call, Boundary inputs, const Tensors& memory) const override;
  void check_buffers(const StageState& stage, const SegmentContext& context) const override {}
  void open(const SegmentCall& call) const override {}
  Tensors backward(const SegmentCall& call, const Tensors& tangents, bool with_parameters) const override;
  bool defers_weights() const override { return false; }
  void finish(const SegmentCall& call) const override {}

  std::shared_ptr<PythonLayers> layers;
  std::vector<int64_t> parameters, buffers;  // indices into the stage's lists
  bool single_use = false;                   // never reused: the next mini-batch searches again
};

}  // namespace gpipe_fast
