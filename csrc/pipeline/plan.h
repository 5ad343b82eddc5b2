// A plan: what one signature makes of a pipeline. Made once, run for every mini-batch of that signature.
#pragma once

#include "device/stream.h"
#include "engine/actions.h"
#include "pipeline/statistics.h"
#include "program/port.h"
#include "program/program.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gpipe_fast {

using Tensors = std::vector<at::Tensor>;

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

// Layers that run as they are, in Python. Called by a stage's worker, without the GIL.
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
  };
  // `key`: draws the mini-batch's, when first asked.
  virtual Result forward(const Boundary& inputs, const std::function<int64_t()>& key, int32_t microbatch,
                         const std::string& action) = 0;
  // Takes gradients of the outputs, returns those of the inputs, and adds to `gradients`, by parameter; all may be
  // undefined.
  virtual Tensors backward(const Opaque& kept, const Tensors& tangents, Tensors& gradients, bool retain,
                           const std::string& action) = 0;
};

// A run of a stage's layers: lowered, or in Python.
struct Segment {
  int64_t begin = 0, end = 0;          // layers, counted within the stage
  std::vector<int64_t> pops, stashes;  // skip connections of the module, in the order of their layers
  // Lowered:
  std::shared_ptr<const Pass> pass;
  std::vector<Layout> inputs;  // what it was lowered for; so the next and the last
  std::shared_ptr<const Form> takes, returns;
  bool draws = false;
  bool writes_inputs = false;                   // copies of them, since they are not its own
  int64_t first_layer = 0;                      // of its draws
  std::vector<std::optional<Layout>> tangents;  // by output; none where none arrives
  Opaque origin;                                // for its finder to know it by
  // In Python:
  std::shared_ptr<PythonLayers> python;
  std::vector<int64_t> parameters, buffers;  // of the stage, that it has
  bool provisional = false;                  // to be looked for again the next time

  // Whether it can run what comes to this layer.
  bool fits(int64_t layer, const Boundary& boundary, const Skips& skips) const;
  // Whether its backward can take these.
  bool expects(const Tensors& arrived) const;
};

// The runs of layers that a micro-batch goes through in a stage.
using Chain = std::vector<std::shared_ptr<const Segment>>;

struct StagePlan {
  int64_t num_layers = 0;
  // Which of the module's parameters and buffers are the stage's, in the order of its ports.
  std::vector<int64_t> parameters;
  std::vector<int64_t> buffers;
  // Of its parameters, those that live on another stage's device. The stage has copies on its own, made anew for every
  // mini-batch: an update through `p.data` shows nowhere. Their gradients go where the parameters are.
  std::vector<int64_t> replicas;
  at::Device device;
  std::vector<Statistics> statistics;
  // By micro-batch. As they were last, where what crosses boundaries is known only when it does; used by the stage's
  // worker alone.
  mutable std::vector<Chain> chains;
  // Where it is so: the segment for what comes to a layer, and the one for the gradients that came to a segment's
  // outputs, which recomputes everything. Null where all is known before.
  std::function<std::shared_ptr<Segment>(int64_t layer, int32_t microbatch, const Boundary&, const Skips&)>
      find;
  std::function<std::shared_ptr<Segment>(const Segment&, int32_t microbatch, const Tensors& tangents)>
      instead;

  // The segment at a place in a micro-batch's chain.
  std::shared_ptr<const Segment> segment(int32_t microbatch, size_t place, int64_t layer,
                                         const Boundary& boundary, const Skips& skips) const;
};

struct Plan {
  std::vector<StagePlan> stages;
  int64_t num_skips;  // skip connections of the module
  Actions forward;
  std::optional<Actions> backward;  // none in inference
  int num_threads;                  // intra-op threads of each stage; programs were lowered for it
  std::shared_ptr<const Form> inputs;
  // The dimension along which each input is cut, none for what every micro-batch gets as a whole; and the one along which
  // outputs are joined.
  std::vector<std::optional<int64_t>> cut_along;
  int64_t join_along;
  std::optional<std::vector<bool>> expected;  // of which outputs the backward expects a gradient; else of any
  // The plan for a backward to which other gradients come than this one expects; it recomputes everything. Null where
  // no other can come.
  std::function<std::shared_ptr<const Plan>(const std::vector<bool>& defined)> instead;
  // Throws unless the micro-batches' outputs can be joined; null where that is known.
  std::function<void(const std::vector<Boundary>&)> check_outputs;

  int64_t num_microbatches() const { return static_cast<int64_t>(stages.front().chains.size()); }
};

}  // namespace gpipe_fast
