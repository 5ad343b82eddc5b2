// The single node that represents a mini-batch in PyTorch's autograd graph.
#pragma once

#include "pipeline/minibatch.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace gpipe_fast {

class Pipeline;

// Connects `outputs` to the autograd graph by one node: the outputs that can need a gradient, if an input or a
// parameter needs one and grad mode is on.
//
// The node's backward raises if an input or a parameter was changed in place after the forward, if the backward
// itself is to be differentiated, or if the forward's saved tensors were freed. If no output has a gradient, no
// input and no parameter gets one.
//
// The node has no edges to parameters that no output depends on, so their hooks are not called. If some outputs
// depend on a parameter but only other outputs have gradients, the parameter's hooks are called with None: PyTorch
// counts the edges to a parameter before it runs the node, so the node cannot omit one.
void connect_to_graph(const Boundary& outputs, const Tensors& inputs, const Tensors& parameters,
                      std::shared_ptr<Pipeline> pipeline, std::shared_ptr<MiniBatch> minibatch,
                      std::vector<std::vector<int64_t>> sizes);

// Returns the bytes that an output's mini-batch keeps for its backward; 0 if it keeps none, or if no pipeline made
// the output.
int64_t kept_bytes(const at::Tensor& output);

}  // namespace gpipe_fast
