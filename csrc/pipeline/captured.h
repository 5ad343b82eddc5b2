// The mini-batch that was run while its plan's graphs were captured: it holds what has fixed addresses, and is only looked
// at from then on.
#pragma once

#include "device/graph.h"
#include "pipeline/minibatch.h"

#include <c10/core/Storage.h>

#include <memory>
#include <vector>

namespace gpipe_fast {

class CapturedMiniBatch {
 public:
  explicit CapturedMiniBatch(std::shared_ptr<MiniBatch> minibatch);

  MiniBatch& minibatch() { return *minibatch_; }
  // Once its forward is captured: what a graph leaves there is what another mini-batch is given later. `alias` makes tensors
  // that own none of the graphs' memory.
  void end_forward(const GraphMaker::Alias& alias);
  // Once its backward is.
  void end_backward(const GraphMaker::Alias& alias);
  // Lets go of the graphs' memory, once nothing more is captured.
  void release();
  // Whether another has the same parameters and buffers, at the same addresses.
  bool has_memory_of(const MiniBatch& other) const;
  // Whether a stage draws; and another's keys, in this one's place, on the calling thread's stream.
  bool draws(size_t stage) const { return minibatch_->stages_[stage].keys.defined(); }
  void draw_for(MiniBatch& other, size_t stage);
  // After a graph, instead of a run: what this one holds is the other's, which keeps the owner of its memory; gradients of
  // parameters are copied, on the calling thread's streams.
  void give_forward(MiniBatch& other, std::shared_ptr<const void> owner) const;
  void give_backward(MiniBatch& other) const;
  // Memory of programs that its plan uses.
  std::vector<c10::Storage> arenas() const;

 private:
  // What a stage of another mini-batch is given. It owns nothing.
  struct Given {
    Tensors parameters, buffers;
    std::vector<bool> reached;
    std::vector<Cell> cells;
    Tensors gradients;
    std::vector<Tensors> input_gradients;  // by micro-batch
    std::vector<const void*> places;       // of the module's buffers
  };

  const std::shared_ptr<MiniBatch> minibatch_;
  std::vector<Given> given_;  // by stage
};

}  // namespace gpipe_fast
