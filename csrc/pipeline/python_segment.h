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
  // note() returns a snapshot of the layers' state before a mini-batch; restore() restores it after a failure.
  virtual Opaque note() = 0;
  virtual void restore(const Opaque& noted) = 0;
  struct Result {
    Boundary outputs;
    Opaque kept;  // for the backward
    bool writes_inputs;
    std::vector<bool> reached;  // by parameter: whether an output depends on it; empty unless requested
  };
  // `key` draws the mini-batch's random key on its first call. `tell_reached` requests `Result::reached`.
  virtual Result forward(const Boundary& inputs, const std::function<int64_t()>& key, int32_t microbatch,
                         const std::string& action, bool tell_reached) = 0;
  // Takes gradients of the outputs, returns gradients of the inputs, and adds to `gradients`, one for each of the
  // layers' parameters. All of them may be undefined.
  virtual Tensors backward(const Opaque& kept, const Tensors& tangents, Tensors& gradients, bool retain,
                           const std::string& action) = 0;
};

class PythonSegment final : public Segment {
 public:
  bool is_lowered() const override { return false; }
  std::optional<int64_t> draws_from() const override { return std::nullopt; }
  bool fits(int64_t layer, const Boundary& boundary, const Skips& skips) const override;
  bool expects(const Tensors& tangents) const override { return true; }
  Result forward(const Visit& visit, Boundary arrived) const override;
  void check_buffers(const StageState& stage) const override {}
  void open(const Visit& visit) const override {}
  Tensors backward(const Visit& visit, const Tensors& tangents, bool whole) const override;
  void finish(const Visit& visit) const override {}

  std::shared_ptr<PythonLayers> layers;
  std::vector<int64_t> parameters, buffers;  // indices into the stage's lists
  bool provisional = false;                  // never reused: the next mini-batch searches again

 private:
  void bring_buffers(StageState& stage) const;
};

}  // namespace gpipe_fast
