// A segment: a run of a stage's layers, lowered or in Python. A mini-batch knows the interface alone.
#pragma once

#include "engine/actions.h"
#include "engine/watch.h"
#include "pipeline/boundary.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace gpipe_fast {

class Arena;
class Segment;
struct StageState;

// What a segment keeps of one micro-batch from its forward to its backward.
struct Link {
  std::shared_ptr<const Segment> segment;
  // By lowered layers: what their backward reads, or that of a segment which stands in for them.
  Tensors inputs, buffers, saved;
  at::Tensor key;
  Opaque kept;  // by layers in Python
  // Where there are skip connections: how what it took and what it returned was nested.
  std::shared_ptr<const Form> takes, returns;
};

// One action of one micro-batch at a segment.
struct Visit {
  const Action& action;
  StageState& stage;
  Link& link;
  Watch& watch;
};

class Segment {
 public:
  virtual ~Segment() = default;

  virtual bool is_lowered() const = 0;
  // The first layer that its draws by a key are counted from; nothing if it needs no key.
  virtual std::optional<int64_t> draws_from() const = 0;
  // Whether it can run what comes to this layer.
  virtual bool fits(int64_t layer, const Boundary& boundary, const Skips& skips) const = 0;
  // Whether its backward can take gradients of its outputs as these are, some undefined.
  virtual bool expects(const Tensors& tangents) const = 0;

  struct Result {
    Boundary outputs;
    bool writes_inputs;  // copies of them, since they are not its own
  };
  virtual Result forward(const Visit& visit, Boundary arrived) const = 0;
  // Throws if a buffer that its backward reads was changed in place since the forward.
  virtual void check_buffers(const StageState& stage) const = 0;
  // The part of its backward that needs no gradient of its outputs.
  virtual void open(const Visit& visit) const = 0;
  // From gradients of its outputs, of which some is defined, to those of its inputs; with `whole`, to its weights' too.
  virtual Tensors backward(const Visit& visit, const Tensors& tangents, bool whole) const = 0;
  // What `backward` left.
  virtual void finish(const Visit& visit) const = 0;

  // Scratch memory of its programs; null where it has none.
  virtual std::shared_ptr<Arena> arena() const { return nullptr; }

  int64_t begin = 0, end = 0;          // layers, counted within the stage
  std::vector<int64_t> pops, stashes;  // skip connections of the module, in the order of their layers
};

// The runs of layers that a micro-batch goes through in a stage.
using Chain = std::vector<std::shared_ptr<const Segment>>;

}  // namespace gpipe_fast
