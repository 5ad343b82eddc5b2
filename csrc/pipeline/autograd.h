// The one node that a mini-batch is in PyTorch's autograd graph.
#pragma once

#include "pipeline/minibatch.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace gpipe_fast {

class Pipeline;

// Makes `outputs` the mini-batch's results in the graph: those that can need a gradient, if an input or a parameter needs
// one and grad mode is on.
//
// The node's backward raises if an input or a parameter was changed in place since, if it is to be differentiated itself,
// or if what the forward kept is gone. Where no output has a gradient, nothing gets one.
//
// Parameters that no output depends on are not tied, so that their hooks are not called. Those of a parameter that some
// output depends on are called with None where only others have a gradient: PyTorch counts what leads to a parameter before
// it runs the node, so the node cannot leave one out.
void tie(const Boundary& outputs, const Tensors& inputs, const Tensors& parameters,
         std::shared_ptr<Pipeline> pipeline, std::shared_ptr<MiniBatch> minibatch,
         std::vector<std::vector<int64_t>> sizes);

// Bytes that the mini-batch of this output keeps for its backward; 0 if it keeps none, or is no pipeline's.
int64_t kept_bytes(const at::Tensor& output);

}  // namespace gpipe_fast
