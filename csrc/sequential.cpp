#include "sequential.h"

#include "check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <set>
#include <utility>

namespace gpipe_fast {
namespace {

void put(Tensors& tensors, int64_t index, at::Tensor tensor) {
  if (static_cast<size_t>(index) >= tensors.size()) tensors.resize(index + 1);
  tensors[index] = std::move(tensor);
}

at::Tensor make_key(int64_t minibatch, int64_t microbatch, int64_t first_layer) {
  at::Tensor key = at::empty({3}, at::kLong);
  int64_t* data = key.mutable_data_ptr<int64_t>();
  data[0] = minibatch;
  data[1] = microbatch;
  data[2] = first_layer;
  return key;
}

}  // namespace

Tensors MiniBatch::gather(const std::vector<Port>& ports, const Cell& cell, const Tensors& tangents) const {
  Tensors gathered;
  gathered.reserve(ports.size());
  for (const Port& port : ports) {
    switch (port.role) {
      case Role::buffer:
        gathered.push_back(cell.buffers.at(port.index));
        break;
      case Role::key:
        gathered.push_back(cell.key);
        break;
      case Role::input:
        gathered.push_back(cell.inputs.at(port.index));
        break;
      case Role::saved:
        gathered.push_back(cell.saved.at(port.index));
        break;
      case Role::tangent:
        gathered.push_back(tangents.at(port.index));
        break;
      default:
        GPIPE_CHECK(false, "a program reads a port that only results have");
    }
  }
  return gathered;
}

void MiniBatch::bind(size_t stage, bool backward) {
  std::set<const Program*> bound;
  for (const auto& pass : stages_[stage].passes) {
    const auto& program = (backward ? pass->backward : pass->forward).program;
    if (program && bound.insert(program.get()).second) program->bind(stages_[stage].parameters);
  }
}

std::vector<Tensors> MiniBatch::forward(std::vector<Tensors> microbatches) {
  GPIPE_CHECK(!stages_.empty(), "a pipeline has at least one stage");
  std::vector<Tensors> buffers;
  cells_.clear();
  for (size_t stage = 0; stage < stages_.size(); ++stage) {
    GPIPE_CHECK(stages_[stage].passes.size() == microbatches.size(), "stage ", stage, " has programs for ",
                stages_[stage].passes.size(), " micro-batches, got ", microbatches.size());
    cells_.emplace_back(microbatches.size());
    bind(stage, false);
    buffers.push_back(stages_[stage].buffers);
  }
  std::vector<Tensors> outputs;
  for (size_t m = 0; m < microbatches.size(); ++m) {
    Tensors values = std::move(microbatches[m]);
    for (size_t stage = 0; stage < stages_.size(); ++stage) {
      values = run_forward(stage, m, std::move(values), buffers[stage]);
    }
    outputs.push_back(std::move(values));
  }
  for (size_t stage = 0; stage < stages_.size(); ++stage) commit(stages_[stage].buffers, buffers[stage]);
  return outputs;
}

Tensors MiniBatch::run_forward(size_t stage, size_t microbatch, Tensors inputs, Tensors& buffers) {
  const StageRun& run = stages_[stage];
  const Pass& pass = *run.passes[microbatch];
  Cell cell{
      std::move(inputs), buffers, {}, make_key(key_, static_cast<int64_t>(microbatch), run.first_layer)};
  Tensors no_accumulators;
  Tensors results = pass.forward.program->run(gather(pass.forward.inputs, cell, {}), no_accumulators, true);
  Tensors outputs;
  for (size_t i = 0; i < results.size(); ++i) {
    const Port& port = pass.forward.outputs[i];
    Tensors& destination = port.role == Role::output   ? outputs
                           : port.role == Role::buffer ? buffers
                                                       : cell.saved;
    put(destination, port.index, std::move(results[i]));
  }
  if (pass.backward.program) {
    // Only what the backward reads outlives the action.
    Cell& kept = cells_[stage][microbatch];
    kept.saved = std::move(cell.saved);
    kept.key = cell.key;
    for (const Port& port : pass.backward.inputs) {
      if (port.role == Role::input) put(kept.inputs, port.index, cell.inputs.at(port.index));
      if (port.role == Role::buffer) put(kept.buffers, port.index, cell.buffers.at(port.index));
    }
    // The commit writes into the module's own tensor, and the recompute must read what stood there before.
    for (const Port& port : pass.forward.outputs) {
      if (port.role != Role::buffer || static_cast<size_t>(port.index) >= kept.buffers.size()) continue;
      at::Tensor& buffer = kept.buffers[port.index];
      if (buffer.defined() && buffer.is_same(run.buffers[port.index])) buffer = buffer.clone();
    }
  }
  return outputs;
}

void MiniBatch::commit(const Tensors& buffers, const Tensors& values) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (!values[i].is_same(buffers[i])) buffers[i].copy_(values[i]);
  }
}

MiniBatch::Gradients MiniBatch::backward(std::vector<Tensors> tangents, bool keep) {
  GPIPE_CHECK(!cells_.empty() && tangents.size() == cells_[0].size(), "backward needs the gradients of ",
              cells_.empty() ? 0 : cells_[0].size(), " micro-batches, once, got ", tangents.size());
  Gradients gradients;
  gradients.inputs.resize(tangents.size());
  for (size_t stage = 0; stage < stages_.size(); ++stage) {
    bind(stage, true);
    gradients.parameters.emplace_back(stages_[stage].parameters.size());
  }
  for (size_t m = tangents.size(); m-- > 0;) {
    Tensors values = std::move(tangents[m]);
    for (size_t stage = stages_.size(); stage-- > 0;) {
      values = run_backward(stage, m, values, gradients.parameters[stage], m + 1 == tangents.size());
      if (!keep) cells_[stage][m] = Cell();
    }
    gradients.inputs[m] = std::move(values);
  }
  if (!keep) cells_.clear();
  return gradients;
}

Tensors MiniBatch::run_backward(size_t stage, size_t microbatch, const Tensors& tangents,
                                Tensors& accumulators, bool first) {
  const PortedProgram& backward = stages_[stage].passes[microbatch]->backward;
  Tensors gradients;
  if (!backward.program) return gradients;  // nothing from here on needs a gradient
  Tensors results = backward.program->run(gather(backward.inputs, cells_[stage][microbatch], tangents),
                                          accumulators, first);
  for (size_t i = 0; i < results.size(); ++i)
    put(gradients, backward.outputs[i].index, std::move(results[i]));
  return gradients;
}

int64_t MiniBatch::kept_bytes() const {
  std::set<const void*> seen;
  int64_t bytes = 0;
  for (const auto& stage : cells_) {
    for (const Cell& cell : stage) {
      for (const Tensors* tensors : {&cell.inputs, &cell.buffers, &cell.saved}) {
        for (const at::Tensor& tensor : *tensors) {
          if (!tensor.defined() || !seen.insert(tensor.storage().unsafeGetStorageImpl()).second) continue;
          bytes += static_cast<int64_t>(tensor.storage().nbytes());
        }
      }
    }
  }
  return bytes;
}

}  // namespace gpipe_fast
