// A run of layers lowered to programs, for one signature of what reaches it and one layout of the gradients that come.
#pragma once

#include "pipeline/segment.h"
#include "program/port.h"
#include "program/program.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace gpipe_fast {

// A program and what its inputs and outputs are.
struct PortedProgram {
  std::shared_ptr<Program> program;
  std::vector<Port> inputs;
  std::vector<Port> outputs;
};

// A forward and the backward that goes with it: either the forward saves and the backward reads what it
// saved, or the forward keeps nothing and the backward recomputes. No backward in inference.
struct Pass {
  PortedProgram forward;
  PortedProgram backward;
  std::vector<int64_t> gradients;  // the stage's parameters whose gradients the backward accumulates
};

class LoweredSegment final : public Segment {
 public:
  bool is_lowered() const override { return true; }
  std::optional<int64_t> draws_from() const override { return draws; }
  bool fits(int64_t layer, const Boundary& boundary, const Skips& skips) const override;
  bool expects(const Tensors& arrived) const override;
  Result forward(const Visit& visit, Boundary arrived) const override;
  void check_buffers(const StageState& stage) const override;
  void open(const Visit& visit) const override;
  Tensors backward(const Visit& visit, const Tensors& arrived, bool whole) const override;
  void finish(const Visit& visit) const override;
  std::shared_ptr<Arena> arena() const override;

  std::shared_ptr<const Pass> pass;
  std::vector<Layout> inputs;  // what it was lowered for, as are `takes` and `tangents`
  std::shared_ptr<const Form> takes, returns;
  std::vector<std::optional<Layout>> tangents;  // by output; none where none arrives
  std::optional<int64_t> draws;                 // see draws_from
  bool writes_inputs = false;
  std::vector<int64_t> reached;  // the stage's parameters that its outputs depend on
  Opaque origin;                 // for the finder of a segment that stands in

 private:
  void keep_only(const StageState& stage, Link& link) const;
};

}  // namespace gpipe_fast
