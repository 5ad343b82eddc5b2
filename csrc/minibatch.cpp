#include "minibatch.h"

#include "check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

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

MiniBatch::MiniBatch(std::shared_ptr<const Plan> plan, const Tensors& parameters, const Tensors& buffers,
                     int64_t key)
    : plan_(std::move(plan)), key_(key), num_parameters_(parameters.size()), stages_(plan_->stages.size()) {
  for (size_t i = 0; i < stages_.size(); ++i) {
    const StagePlan& plan = plan_->stages[i];
    Stage& stage = stages_[i];
    // Not the parameters themselves: `p.data = ...` between forward and backward must not reach the backward.
    for (int64_t index : plan.parameters) stage.parameters.push_back(parameters.at(index).tensor_data());
    for (int64_t index : plan.buffers) stage.module_buffers.push_back(buffers.at(index));
  }
}

void MiniBatch::begin_forward(std::vector<Tensors> microbatches) {
  GPIPE_CHECK(static_cast<int64_t>(microbatches.size()) == plan_->num_microbatches(), "a plan for ",
              plan_->num_microbatches(), " micro-batches got ", microbatches.size());
  for (Stage& stage : stages_) {
    stage.cells = std::vector<Cell>(microbatches.size());
    stage.buffers = stage.module_buffers;
  }
  num_inputs_ = microbatches.front().size();
  for (size_t m = 0; m < microbatches.size(); ++m) {
    stages_.front().cells[m].arrived = std::move(microbatches[m]);
  }
  surroundings_.emplace(plan_->num_threads);
  phase_ = Phase::forward;
}

std::vector<Tensors> MiniBatch::take_outputs() {
  std::vector<Tensors> outputs;
  for (Cell& cell : stages_.back().cells) outputs.push_back(std::move(cell.outputs));
  return outputs;
}

void MiniBatch::end_forward() {
  at::NoGradGuard no_grad;
  for (Stage& stage : stages_) {
    for (size_t i = 0; i < stage.buffers.size(); ++i) {
      if (!stage.buffers[i].is_same(stage.module_buffers[i])) stage.module_buffers[i].copy_(stage.buffers[i]);
    }
    stage.buffers.clear();
  }
  note_buffers();
  phase_ = Phase::idle;
  kept_ = true;
}

void MiniBatch::note_buffers() {
  for (Stage& stage : stages_) {
    for (const Cell& cell : stage.cells) {
      for (size_t i = 0; i < cell.buffers.size(); ++i) {
        const at::Tensor& own = stage.module_buffers[i];
        if (cell.buffers[i].is_same(own) && !own.is_inference())
          stage.noted_buffers[i] = {own._version(), own.const_data_ptr()};
      }
    }
  }
}

void MiniBatch::check_buffers() const {
  for (size_t stage = 0; stage < stages_.size(); ++stage) {
    for (const auto& [index, noted] : stages_[stage].noted_buffers) {
      const at::Tensor& buffer = stages_[stage].module_buffers[index];
      GPIPE_CHECK(buffer._version() == noted.version && buffer.const_data_ptr() == noted.data,
                  "one of the variables needed for gradient computation has been modified by an inplace "
                  "operation: buffer ",
                  index, " of stage ", stage, " [", buffer.toString(), " ", buffer.sizes(),
                  "] is at version ", buffer._version(), "; expected version ", noted.version,
                  " instead, with the same data");
    }
  }
}

void MiniBatch::begin_backward(std::shared_ptr<const Plan> plan, std::vector<Tensors> microbatches,
                               bool retain) {
  GPIPE_CHECK(kept_, "what the forward kept is gone: a second backward needs retain_graph=True in the first");
  GPIPE_CHECK(static_cast<int64_t>(microbatches.size()) == plan_->num_microbatches(),
              "the backward needs the gradients of ", plan_->num_microbatches(), " micro-batches, got ",
              microbatches.size());
  check_buffers();
  for (Stage& stage : stages_) {
    stage.gradients = Tensors(stage.parameters.size());
    stage.has_gradients = false;
  }
  for (size_t m = 0; m < microbatches.size(); ++m) {
    stages_.back().cells[m].tangents = std::move(microbatches[m]);
  }
  surroundings_.emplace(plan_->num_threads);
  backward_plan_ = std::move(plan);
  retain_ = retain;
  phase_ = Phase::backward;
}

MiniBatch::Gradients MiniBatch::end_backward() {
  Gradients gradients;
  for (Cell& cell : stages_.front().cells) gradients.inputs.push_back(std::move(cell.input_gradients));
  gradients.parameters.resize(num_parameters_);
  for (size_t i = 0; i < stages_.size(); ++i) {
    const std::vector<int64_t>& indices = plan_->stages[i].parameters;
    for (size_t j = 0; j < indices.size(); ++j) {
      gradients.parameters[indices[j]] = std::move(stages_[i].gradients[j]);
    }
    stages_[i].gradients.clear();
  }
  phase_ = Phase::idle;
  backward_plan_.reset();
  kept_ = retain_;
  return gradients;
}

void MiniBatch::abandon() {
  kept_ = kept_ && retain_;
  for (Stage& stage : stages_) {
    stage.open.reset();
    stage.buffers.clear();
    stage.gradients.clear();
    for (Cell& cell : stage.cells) {
      cell.arrived.clear();
      cell.outputs.clear();
      cell.tangents.clear();
      cell.input_gradients.clear();
    }
    if (!kept_) stage.cells.clear();
  }
  phase_ = Phase::idle;
  backward_plan_.reset();
}

void MiniBatch::enter(int32_t stage, const std::function<void()>& walk) {
  surroundings_->run([&] {
    bind(stage);
    walk();
  });
}

void MiniBatch::bind(int32_t stage) {
  const bool backward = phase_ == Phase::backward;
  std::set<const Program*> bound;
  for (const auto& pass : (backward ? backward_plan_ : plan_)->stages[stage].passes) {
    const auto& program = (backward ? pass->backward : pass->forward).program;
    if (program && bound.insert(program.get()).second) program->bind(stages_[stage].parameters);
  }
}

void MiniBatch::run(const Action& action, Watch& watch) {
  at::RecordFunction range(at::RecordScope::USER_SCOPE);
  if (range.isActive()) range.before("PP:" + action.name());
  const int32_t m = action.microbatch;
  Cell& cell = stages_[action.stage].cells[m];
  switch (action.kind) {
    case ActionKind::forward:
      return forward(action, watch);
    case ActionKind::recompute:
    case ActionKind::backward:
    case ActionKind::backward_inputs:
    case ActionKind::backward_weights:
      return backward(action, watch);
    case ActionKind::send_forward:
      stages_[action.stage + 1].cells[m].arrived = std::move(cell.outputs);
      return;
    case ActionKind::send_backward:
      stages_[action.stage - 1].cells[m].tangents = std::move(cell.input_gradients);
      return;
    case ActionKind::recv_forward:
    case ActionKind::recv_backward:
      return;  // the sender has put it here
  }
}

const at::Tensor& MiniBatch::find(const Port& port, const Cell& cell) {
  switch (port.role) {
    case Role::buffer:
      return cell.buffers.at(port.index);
    case Role::key:
      return cell.key;
    case Role::input:
      return cell.inputs.at(port.index);
    case Role::saved:
      return cell.saved.at(port.index);
    case Role::tangent:
      return cell.tangents.at(port.index);
    default:
      GPIPE_CHECK(false, "a program reads a port that only results have");
  }
}

void MiniBatch::forward(const Action& action, Watch& watch) {
  const StagePlan& plan = plan_->stages[action.stage];
  const Pass& pass = *plan.passes[action.microbatch];
  Stage& stage = stages_[action.stage];
  Cell& cell = stage.cells[action.microbatch];
  cell.inputs = std::move(cell.arrived);
  cell.buffers = stage.buffers;
  cell.key = make_key(key_, action.microbatch, plan.first_layer);
  Tensors inputs, no_accumulators;
  inputs.reserve(pass.forward.inputs.size());
  for (const Port& port : pass.forward.inputs) inputs.push_back(find(port, cell));
  Tensors results = pass.forward.program->run(inputs, no_accumulators, true, &watch);
  for (size_t i = 0; i < results.size(); ++i) {
    const Port& port = pass.forward.outputs[i];
    Tensors& destination = port.role == Role::output   ? cell.outputs
                           : port.role == Role::buffer ? stage.buffers
                                                       : cell.saved;
    put(destination, port.index, std::move(results[i]));
  }
  keep_only(pass, stage, cell);
}

// Only what the backward reads outlives the action. A backward that stands in for the plan's may read any input and any
// buffer.
void MiniBatch::keep_only(const Pass& pass, const Stage& stage, Cell& cell) const {
  Tensors inputs, buffers;
  for (const Port& port : pass.backward.inputs) {
    if (port.role == Role::input) put(inputs, port.index, cell.inputs.at(port.index));
    if (port.role == Role::buffer) put(buffers, port.index, cell.buffers.at(port.index));
  }
  if (plan_->instead) {
    inputs = std::move(cell.inputs);
    buffers = std::move(cell.buffers);
  }
  // The module's own buffer is written when the forward has succeeded, and the recompute must read what stood there
  // before.
  for (const Port& port : pass.forward.outputs) {
    if (port.role != Role::buffer || static_cast<size_t>(port.index) >= buffers.size()) continue;
    at::Tensor& buffer = buffers[port.index];
    if (buffer.defined() && buffer.is_same(stage.module_buffers[port.index])) buffer = buffer.clone();
  }
  cell.inputs = std::move(inputs);
  cell.buffers = std::move(buffers);
  if (pass.backward.program) return;
  cell.saved.clear();
  if (!plan_->instead) cell.key.reset();
}

void MiniBatch::open(const PortedProgram& program, Stage& stage, const Cell& cell, Watch& watch) {
  stage.open.emplace(*program.program, stage.gradients, !stage.has_gradients);
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    if (program.inputs[i].role != Role::tangent) stage.open->take(i, find(program.inputs[i], cell));
  }
  stage.open->execute(Part::early, &watch);
}

void MiniBatch::backward(const Action& action, Watch& watch) {
  const PortedProgram& program = backward_plan_->stages[action.stage].passes[action.microbatch]->backward;
  Stage& stage = stages_[action.stage];
  Cell& cell = stage.cells[action.microbatch];
  const bool whole = action.kind == ActionKind::backward;
  const bool inputs = whole || action.kind == ActionKind::backward_inputs;
  const bool weights = whole || action.kind == ActionKind::backward_weights;
  if (program.program) {  // else nothing from here on needs a gradient
    if (!stage.open && action.kind != ActionKind::backward_weights) open(program, stage, cell, watch);
    GPIPE_CHECK(stage.open, action.name(), " goes on with a backward that was not begun");
    if (inputs) {
      for (size_t i = 0; i < program.inputs.size(); ++i) {
        if (program.inputs[i].role == Role::tangent) stage.open->take(i, find(program.inputs[i], cell));
      }
      stage.open->execute(Part::results, &watch);
      Tensors results = stage.open->outputs();
      for (size_t i = 0; i < results.size(); ++i) {
        put(cell.input_gradients, program.outputs[i].index, std::move(results[i]));
      }
    }
    if (weights) {
      stage.open->execute(Part::rest, &watch);
      stage.open->finish();
      stage.open.reset();
      stage.has_gradients = true;
    }
  }
  if (!weights) return;
  cell.tangents.clear();
  if (retain_) return;
  cell.inputs.clear();
  cell.buffers.clear();
  cell.saved.clear();
  cell.key.reset();
}

int64_t MiniBatch::kept_bytes() const {
  std::set<const void*> seen;
  int64_t bytes = 0;
  for (const Stage& stage : stages_) {
    for (const Cell& cell : stage.cells) {
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
