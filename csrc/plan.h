// A plan: what one signature makes of a pipeline. Made once, run for every mini-batch of that signature.
#pragma once

#include "actions.h"
#include "port.h"
#include "program.h"

#include <cstdint>
#include <functional>
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
};

struct StagePlan {
  int64_t first_layer;
  // Which of the module's parameters and buffers are the stage's, in the order of its ports.
  std::vector<int64_t> parameters;
  std::vector<int64_t> buffers;
  std::vector<std::shared_ptr<const Pass>> passes;  // by micro-batch
};

struct Plan {
  std::vector<StagePlan> stages;
  Actions forward;
  std::optional<Actions> backward;   // none in inference
  int num_threads;                   // intra-op threads of each stage; programs were lowered for it
  std::vector<bool> replicated;      // which inputs every micro-batch gets as a whole
  std::vector<bool> differentiable;  // which outputs can need a gradient
  std::vector<bool> expected;        // of which outputs the backward expects a gradient
  // The plan for a backward to which other gradients come than this one expects; it recomputes everything. Null where
  // no other can come.
  std::function<std::shared_ptr<const Plan>(const std::vector<bool>& defined)> instead;

  int64_t num_microbatches() const { return static_cast<int64_t>(stages.front().passes.size()); }
};

}  // namespace gpipe_fast
