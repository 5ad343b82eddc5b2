// A segment: consecutive layers of a stage, lowered or in Python. MiniBatch depends on this interface alone.
#pragma once

#include "engine/actions.h"
#include "engine/cancellation_token.h"
#include "pipeline/boundary.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace gpipe_fast {

class Arena;
class Segment;
struct Layout;
struct StageState;

// A segment's state of one micro-batch between forward and backward (like autograd's ctx).
struct SegmentContext {
  std::shared_ptr<const Segment> segment;
  // Kept by lowered layers: tensors that their backward, or the fallback segment's, reads.
  Tensors inputs, buffers, saved;
  Tensors shared;  // the saved tensors that were not the only ones to refer to their memory after the forward
  at::Tensor key;
  // Kept from a backward without `with_parameters` to finish(), if the segment defers weights: what its program of
  // weights reads besides the above.
  Tensors tangents, held;
  bool has_deferred_weights = false;
  PythonObject kept;  // kept by layers in Python
  // The forms of the segment's inputs, if it pops skip tensors, and of its outputs, if it stashes some; else null.
  std::shared_ptr<const BoundaryForm> input_form, output_form;
};

// The arguments of a call to a segment, for one action of one micro-batch.
struct SegmentCall {
  const Action& action;
  StageState& stage;
  SegmentContext& context;
  CancellationToken& token;
};

class Segment {
 public:
  virtual ~Segment() = default;

  virtual bool is_lowered() const = 0;
  // Returns the layer index in its random key: its first layer, counted within the module. nullopt if it needs no key.
  virtual std::optional<int64_t> random_key_layer() const = 0;
  // Returns whether it can run `layer` for these boundary tensors and stashed skip tensors.
  virtual bool accepts_inputs(int64_t layer, const Boundary& boundary, const Skips& skips) const = 0;
  // Returns whether its backward accepts these gradients of its outputs, some of which may be undefined.
  virtual bool accepts_gradients(const Tensors& tangents) const = 0;

  struct Result {
    Boundary outputs;
    std::vector<int64_t> written_inputs;  // its layers change these in place; they get copies
  };
  // `memory`: tensors into which it writes its placeable outputs; undefined or missing for those that it allocates.
  virtual Result forward(const SegmentCall& call, Boundary inputs, const Tensors& memory) const = 0;
  // Returns, by output, the layout of those that it can write into given memory; null or missing for others.
  virtual std::vector<const Layout*> placeable() const { return {}; }
  // Throws if a buffer that its backward reads was changed in place after the forward.
  virtual void check_buffers(const StageState& stage, const SegmentContext& context) const = 0;
  // Starts the backward: runs the part that needs no gradients of its outputs.
  virtual void open(const SegmentCall& call) const = 0;
  // Returns the gradients of its inputs, given those of its outputs, at least one of which is defined. With
  // `with_parameters`, also accumulates the gradients of its parameters; otherwise finish() does.
  virtual Tensors backward(const SegmentCall& call, const Tensors& tangents, bool with_parameters) const = 0;
  // Returns whether other segments may run between a backward without `with_parameters` and finish().
  virtual bool defers_weights() const = 0;
  // Runs the rest of a backward without `with_parameters`, if there is one.
  virtual void finish(const SegmentCall& call) const = 0;

  // Returns the bytes of scratch memory that its largest program needs.
  virtual int64_t scratch_bytes() const { return 0; }
  // Returns the arena of its programs; null for layers in Python.
  virtual std::shared_ptr<Arena> arena() const { return nullptr; }

  int64_t begin = 0, end = 0;          // range of layers, counted within the stage
  std::vector<int64_t> pops, stashes;  // indices of the module's skip connections, in layer order
};

// The segments of a stage that a micro-batch runs through, in order.
using Chain = std::vector<std::shared_ptr<const Segment>>;

}  // namespace gpipe_fast
