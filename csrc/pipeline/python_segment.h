// A run of layers that run as they are, in Python.
#pragma once

#include "pipeline/segment.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gpipe_fast {

// Called by a stage's worker, without the GIL.
class PythonLayers {
 public:
  virtual ~PythonLayers() = default;
  // Their state as it is, before a mini-batch; and puts it back after one that failed.
  virtual Opaque note() = 0;
  virtual void restore(const Opaque& noted) = 0;
  struct Result {
    Boundary outputs;
    Opaque kept;  // for the backward
    bool writes_inputs;
    std::vector<bool> reached;  // the layers' parameters that outputs depend on; if asked for
  };
  // `key`: draws the mini-batch's, when first asked. `tell_reached`: whether the result tells it.
  virtual Result forward(const Boundary& inputs, const std::function<int64_t()>& key, int32_t microbatch,
                         const std::string& action, bool tell_reached) = 0;
  // Takes gradients of the outputs, returns those of the inputs, and adds to `gradients`, by parameter; all may be
  // undefined.
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
  std::vector<int64_t> parameters, buffers;  // of the stage, that it has
  bool provisional = false;                  // to be looked for again the next time

 private:
  void bring_buffers(StageState& stage) const;
};

}  // namespace gpipe_fast
