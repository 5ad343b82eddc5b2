// The sequential executor: one thread runs all stages in turn. The reference for every other way to run them.
//
//   forward, M = 2, K = 3:  0F0 1F0 2F0 0F1 1F1 2F1      backward:  2B1 1B1 0B1 2B0 1B0 0B0
#pragma once

#include "port.h"
#include "program.h"

#include <ATen/core/Tensor.h>

#include <memory>
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

// One stage of one mini-batch.
struct StageRun {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;  // written once, when the whole forward has succeeded
  int64_t first_layer;
  std::vector<std::shared_ptr<const Pass>> passes;  // by micro-batch
};

using Tensors = std::vector<at::Tensor>;

// One mini-batch between its forward and its backward. Not thread safe; needs no GIL.
class MiniBatch {
 public:
  MiniBatch(std::vector<StageRun> stages, int64_t key) : stages_(std::move(stages)), key_(key) {}

  // Boundary inputs of the first stage to outputs of the last, by micro-batch. Buffers are written after the
  // last action; an exception before that leaves them as they were.
  std::vector<Tensors> forward(std::vector<Tensors> microbatches);

  struct Gradients {
    std::vector<Tensors> inputs;      // by micro-batch; undefined where none is due
    std::vector<Tensors> parameters;  // by stage; undefined where none is due
  };
  // Gradients of the last stage's outputs, by micro-batch, to gradients. Tensors kept by the forward are
  // dropped as it goes, unless `keep`: only then it can be called again.
  Gradients backward(std::vector<Tensors> tangents, bool keep);

  // Bytes kept for the backward now: boundary inputs, saved tensors, and buffers of each micro-batch; storage
  // that several share counts once.
  int64_t kept_bytes() const;

 private:
  // What one stage keeps of one micro-batch.
  struct Cell {
    Tensors inputs;
    Tensors buffers;
    Tensors saved;
    at::Tensor key;
  };

  Tensors gather(const std::vector<Port>& ports, const Cell& cell, const Tensors& tangents) const;
  Tensors run_forward(size_t stage, size_t microbatch, Tensors inputs, Tensors& buffers);
  Tensors run_backward(size_t stage, size_t microbatch, const Tensors& tangents, Tensors& accumulators,
                       bool first);
  void bind(size_t stage, bool backward);
  static void commit(const Tensors& buffers, const Tensors& values);

  std::vector<StageRun> stages_;
  int64_t key_;
  std::vector<std::vector<Cell>> cells_;  // by stage, by micro-batch
};

}  // namespace gpipe_fast
