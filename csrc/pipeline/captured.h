// The mini-batch that ran while its plan's graphs were captured. It holds the tensors with fixed addresses, and
// does not run again.
//
// Memory outside of the graphs' pool that the graphs use, and what keeps it alive:
//
//   copies of inputs, output gradients        GraphCache::Entry
//   parameters, also those replicated         the mini-batch; a replay requires that they are at the same addresses
//   module buffers                            the same
//   deferred statistics' initial zeros        `initial_buffers_`
//   random keys                               the mini-batch
//   constants of programs                     the plan, which the mini-batch holds
//   scratch memory of programs                GraphCache::Entry (arenas)
//   kernels                                   the process, which unloads none
//   blocks of pinned rings                    the transport, which the mini-batch holds
//
// Numbers, and addresses of tensors, are copied when a launch is captured. cuBLAS workspaces are in the pool. Copies
// between pageable host memory and a GPU cannot be captured.
#pragma once

#include "device/graph.h"
#include "pipeline/minibatch.h"

#include <c10/core/Storage.h>

#include <memory>
#include <optional>
#include <vector>

namespace gpipe_fast {

class CapturedMiniBatch {
 public:
  explicit CapturedMiniBatch(std::shared_ptr<MiniBatch> minibatch);
  CapturedMiniBatch(const CapturedMiniBatch&) = delete;
  CapturedMiniBatch& operator=(const CapturedMiniBatch&) = delete;
  ~CapturedMiniBatch();

  MiniBatch& minibatch() { return *minibatch_; }
  // Begins the mini-batch's forward.
  void begin_forward(std::vector<Tensors> microbatches);
  // Call once the forward is captured: keeps aliases of the tensors that the graph writes, to give them to later
  // mini-batches. `alias` makes tensors that own none of the graphs' memory.
  void end_forward(const GraphMaker::Alias& alias);
  // Call once the backward is captured.
  void end_backward(const GraphMaker::Alias& alias);
  // Releases the graphs' memory. Call after the last capture.
  void release();
  // Returns whether another mini-batch has the same parameters and buffers, at the same addresses.
  bool has_same_addresses(const MiniBatch& other) const;
  // needs_keys() returns whether a stage needs random keys. write_keys_of() overwrites them with keys of another
  // mini-batch, on the calling thread's stream.
  bool needs_keys(size_t stage) const { return minibatch_->stages_[stage].keys.defined(); }
  void write_keys_of(MiniBatch& other, size_t stage);
  // Call after a replay, which replaces a run: gives `other` the tensors that the graph wrote. `other` keeps
  // `owner`, which owns their memory. Gradients of parameters are copied, on the calling thread's streams.
  void share_forward(MiniBatch& other, std::shared_ptr<const void> owner) const;
  void copy_backward(MiniBatch& other) const;
  // Holds the arena of a stage's programs, and returns it. Call before the first capture, on the stage's stream.
  std::optional<c10::Storage> hold_arena(size_t stage) const;

 private:
  // Tensors to give to a stage of another mini-batch. They own no memory.
  struct StageTensors {
    Tensors parameters, buffers;
    std::vector<bool> reached;
    std::set<int64_t> new_versions;
    std::vector<MicroBatchState> microbatch_states;
    Tensors gradients;
    std::vector<Tensors> input_gradients;       // by micro-batch
    std::vector<const void*> buffer_addresses;  // addresses of the module's buffers
  };

  const std::shared_ptr<MiniBatch> minibatch_;
  std::vector<Tensors> initial_buffers_;     // by stage: the buffers that the first micro-batch reads
  std::vector<StageTensors> stage_tensors_;  // by stage
};

}  // namespace gpipe_fast
