// A plan: what one signature makes of a pipeline. Made once, run for every mini-batch of that signature.
#pragma once

#include "engine/actions.h"
#include "pipeline/boundary.h"
#include "pipeline/segment.h"
#include "pipeline/statistics.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace gpipe_fast {

// Finds a stage's segments while it runs.
class Finder {
 public:
  virtual ~Finder() = default;
  // The one for what comes to a layer.
  virtual std::shared_ptr<const Segment> find(int64_t layer, int32_t microbatch, const Boundary& boundary,
                                              const Skips& skips) = 0;
  // The one that takes these gradients of a lowered segment's outputs, which that one does not expect. It recomputes
  // everything.
  virtual std::shared_ptr<const Segment> stand_in(const Segment& segment, const Tensors& tangents) = 0;
};

struct StagePlan {
  int64_t num_layers = 0;
  // Which of the module's parameters and buffers are the stage's, in the order of its ports.
  std::vector<int64_t> parameters;
  std::vector<int64_t> buffers;
  // Of its parameters, those that live on another stage's device. The stage has copies on its own, made anew for every
  // mini-batch: an update through `p.data` shows nowhere. Their gradients go where the parameters are.
  std::vector<int64_t> replicas;
  at::Device device = at::kCPU;
  std::vector<Statistics> statistics;
  // By micro-batch. All there is to run, and lasting, where that is known before; else as they were last, and changed by
  // the stage's worker.
  mutable std::vector<Chain> chains;
  bool known = false;
  std::shared_ptr<Finder> finder;

  // Whether nothing that it runs is in Python.
  bool is_lowered() const;

  // The segment at a place in a micro-batch's chain.
  std::shared_ptr<const Segment> segment(int32_t microbatch, size_t place, int64_t layer,
                                         const Boundary& boundary, const Skips& skips) const;
  // The one that takes gradients that another does not expect.
  std::shared_ptr<const Segment> stand_in(int32_t microbatch, const Segment& segment,
                                          const Tensors& tangents) const;
};

struct Plan {
  std::vector<StagePlan> stages;
  int64_t num_skips = 0;  // skip connections of the module
  std::shared_ptr<const Actions> forward;
  std::shared_ptr<const Actions> backward;  // none in inference
  int num_threads = 1;                      // intra-op threads of each stage; programs were lowered for it
  std::shared_ptr<const Form> inputs;
  // The dimension along which each input is cut, none for what every micro-batch gets as a whole; and the one along which
  // outputs are joined.
  std::vector<std::optional<int64_t>> cut_along;
  int64_t join_along = 0;
  // Throws unless the micro-batches' outputs can be joined; null where that is known.
  std::function<void(const std::vector<Boundary>&)> check_outputs;

  bool is_lowered() const;
  int64_t num_microbatches() const { return static_cast<int64_t>(stages.front().chains.size()); }
};

}  // namespace gpipe_fast
