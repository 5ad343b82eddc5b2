// A segment that is lowered to programs, for one signature of its inputs and one set of layouts of its output
// gradients.
#pragma once

#include "pipeline/segment.h"
#include "program/port.h"
#include "program/program.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace gpipe_fast {

struct StartedBackward;

// A program and the roles of its inputs and outputs.
struct ProgramWithPorts {
  std::shared_ptr<Program> program;
  std::vector<Port> inputs;
  std::vector<Port> outputs;
};

// A forward program and its backward program. Either the forward saves tensors that the backward reads, or the
// forward saves nothing and the backward recomputes. In inference there is no backward. If there is a program of
// weights, it accumulates the gradients of parameters, from values that the backward returns, and the backward
// computes those of inputs.
struct ProgramPair {
  ProgramWithPorts forward;
  ProgramWithPorts backward;
  ProgramWithPorts weights;
  std::vector<int64_t> gradients;  // indices of the parameters whose gradients are accumulated
};

class LoweredSegment final : public Segment {
 public:
  bool is_lowered() const override { return true; }
  std::optional<int64_t> random_key_layer() const override { return first_random_layer; }
  bool accepts_inputs(int64_t layer, const Boundary& boundary, const Skips& skips) const override;
  bool accepts_gradients(const Tensors& gradients) const override;
  Result forward(const SegmentCall& call, Boundary boundary, const Tensors& memory) const override;
  std::vector<const Layout*> placeable() const override;
  void check_buffers(const StageState& stage, const SegmentContext& context) const override;
  void open(const SegmentCall& call) const override;
  Tensors backward(const SegmentCall& call, const Tensors& output_gradients,
                   bool with_parameters) const override;
  bool defers_weights() const override { return programs->weights.program != nullptr; }
  void finish(const SegmentCall& call) const override;
  int64_t scratch_bytes() const override;
  std::shared_ptr<Arena> arena() const override;

  std::shared_ptr<const ProgramPair> programs;
  std::vector<Layout>
      inputs;  // the segment was lowered for these `inputs`, `input_form` and `tangent_layouts`
  std::shared_ptr<const BoundaryForm> input_form, output_form;
  std::vector<std::optional<Layout>> tangent_layouts;  // by output; nullopt if no gradient arrives
  std::optional<int64_t> first_random_layer;           // see key_layer
  std::vector<int64_t> written_inputs;
  std::vector<int64_t> reached;  // indices of the stage's parameters that its outputs depend on
  PythonObject origin;           // opaque to C++; the segment finder uses it to find a fallback

 private:
  void keep_only(const StageState& stage, SegmentContext& context) const;
  // Starts a run that accumulates the gradients of parameters.
  std::unique_ptr<StartedBackward> start(const ProgramWithPorts& program, StageState& stage) const;
  void keep_for_weights(const StageState& stage, SegmentContext& context, const Tensors& tangents) const;
  // Completes a run and adds up its gradients.
  void complete(StartedBackward& run, StageState& stage, CancellationToken& token) const;
};

}  // namespace gpipe_fast
