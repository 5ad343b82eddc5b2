// The one node that a mini-batch is in PyTorch's autograd graph.
#pragma once

#include "minibatch.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace gpipe_fast {

class Pipeline;

// Makes `output` the mini-batch's result in the graph, if `input` or a parameter needs a gradient and grad mode is on.
//
// The node's backward raises if the input or a parameter was changed in place since, if it is to be differentiated
// itself, or if what the forward kept is gone. An undefined gradient of the output gives undefined ones.
void tie(at::Tensor& output, const at::Tensor& input, const Tensors& parameters,
         std::shared_ptr<Pipeline> pipeline, std::shared_ptr<MiniBatch> minibatch,
         std::vector<int64_t> sizes);

// Bytes that the mini-batch of this output keeps for its backward; 0 if it keeps none, or is no pipeline's.
int64_t kept_bytes(const at::Tensor& output);

}  // namespace gpipe_fast
