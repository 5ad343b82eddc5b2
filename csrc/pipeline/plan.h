// A plan: everything that a pipeline runs for one input signature. Built once, run for every mini-batch of that
// signature.
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
#include <string>
#include <utility>
#include <vector>

namespace gpipe_fast {

// Finds the segments of a stage while it runs.
class SegmentFinder {
 public:
  virtual ~SegmentFinder() = default;
  // Returns the segment that runs `layer` for these boundary tensors and stashed skip tensors.
  virtual std::shared_ptr<const Segment> find(int64_t layer, int32_t microbatch, const Boundary& boundary,
                                              const Skips& skips) = 0;
  // Returns the fallback for a lowered segment whose backward does not accept these gradients of its outputs. The
  // fallback accepts them, and recomputes everything.
  virtual std::shared_ptr<const Segment> fallback(const Segment& segment, const Tensors& tangents) = 0;
};

struct StagePlan {
  int64_t num_layers = 0;
  // The stage's parameters and buffers, as indices into the module's. Ports refer to positions in these lists.
  std::vector<int64_t> parameters;
  std::vector<int64_t> buffers;
  // Positions of the parameters that live on another stage's device. The stage uses copies on its own device, made
  // anew for every mini-batch because an update through `p.data` cannot be detected. Their gradients are copied
  // back to the device of the originals.
  std::vector<int64_t> replicated_parameters;
  // Positions of the parameters that are gathered from all replicas for a mini-batch. Each replica has a share of their
  // rows, and gets that share of their gradients' sum.
  std::vector<int64_t> gathered_parameters;
  at::Device device = at::kCPU;
  std::vector<Statistics> statistics;
  // By micro-batch. If `has_fixed_chains`, complete and constant. Otherwise the chains of the latest run, which the
  // stage's worker updates.
  mutable std::vector<Chain> chains;
  bool has_fixed_chains = false;
  std::shared_ptr<SegmentFinder> finder;

  // Returns whether its chains are fixed and contain lowered segments only.
  bool is_lowered() const;

  // Returns the segment at `position` in a micro-batch's chain. Searches for it if the cached one does not accept
  // these tensors.
  std::shared_ptr<const Segment> segment(int32_t microbatch, size_t position, int64_t layer,
                                         const Boundary& boundary, const Skips& skips) const;
  // Returns the fallback for a segment that does not accept these gradients.
  std::shared_ptr<const Segment> fallback(int32_t microbatch, const Segment& segment,
                                          const Tensors& tangents) const;
};

// A parameter that stages of several processes share, and of which all of them compute a gradient. Each process has a
// copy, and sums the gradients of all stages.
struct Tie {
  std::vector<std::pair<int32_t, int64_t>>
      own;                         // the stages of this process, and the parameter's position in each
  std::vector<int32_t> senders;    // the stages of other processes, which send to the first of `own`
  std::vector<int32_t> receivers;  // of each other process, the first of these stages
};

struct Plan {
  std::vector<StagePlan> stages;
  int64_t num_skips = 0;  // skip connections in the module
  std::shared_ptr<const Actions> forward;
  std::shared_ptr<const Actions> backward;  // null in inference
  // Both in one run, for Pipeline::step(); else null.
  std::shared_ptr<const Actions> step;
  bool defers_weights = false;  // in the step, a stage computes other things between an I and its W
  // By skip connection, the stage that stashes it, -1 if the caller gives it, and the stage that pops it.
  std::vector<std::pair<int32_t, int32_t>> skip_ends;
  std::vector<Tie> ties;
  // The form of what a process returns in place of the outputs if it does not have the last stage; else null.
  std::shared_ptr<const BoundaryForm> token;
  // The skip connections whose tensors the caller gives, such as the targets of a loss, and the dimension along which
  // each tensor is split; nullopt if every micro-batch gets it whole.
  std::vector<int64_t> given_skips;
  std::vector<std::optional<int64_t>> given_dims;
  int num_threads = 1;  // intra-op threads of each stage; programs were lowered for this number
  std::vector<std::string> parameter_names;  // of the module's parameters, for messages
  std::shared_ptr<const BoundaryForm> inputs;
  // The dimension along which each input is split; nullopt if every micro-batch gets the whole input.
  std::vector<std::optional<int64_t>> split_dims;
  // The dimension along which outputs are concatenated.
  int64_t cat_dim = 0;
  // Throws unless the micro-batches' outputs can be concatenated; null if that is certain in advance.
  std::function<void(const std::vector<Boundary>&)> check_outputs;

  bool is_lowered() const;
  // Returns whether a backward may follow a forward.
  bool has_backward() const { return backward != nullptr || step != nullptr; }
  int64_t num_microbatches() const { return static_cast<int64_t>(stages.front().chains.size()); }
};

}  // namespace gpipe_fast
