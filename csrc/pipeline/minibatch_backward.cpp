// The backward of a mini-batch.
#include "check.h"
#include "pipeline/minibatch.h"
#include "pipeline/skip.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>

#include <algorithm>
#include <utility>

namespace gpipe_fast {

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
    stage.foreign.clear();
    stage.bound.clear();
  }
  for (size_t m = 0; m < microbatches.size(); ++m) {
    stages_.back().cells[m].tangents = std::move(microbatches[m]);
  }
  surroundings_.emplace(plan_->num_threads);
  backward_plan_ = std::move(plan);
  retain_ = retain;
  phase_ = Phase::backward;
}

MiniBatch::Gradients MiniBatch::end_backward(const std::vector<Stream>& callers) {
  Gradients gradients;
  for (Cell& cell : stages_.front().cells) gradients.inputs.push_back(std::move(cell.input_gradients));
  gradients.parameters.resize(num_parameters_);
  // Of a parameter that several stages have, the last one's first, as a backward meets them.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i = stages_.size(); i-- > 0;) {
    const std::vector<int64_t>& indices = plan_->stages[i].parameters;
    for (size_t j = 0; j < indices.size(); ++j) {
      at::Tensor& sum = gradients.parameters[indices[j]];
      at::Tensor& own = stages_[i].gradients[j];
      if (!own.defined()) continue;
      const auto home = stages_[i].homes.find(static_cast<int64_t>(j));
      if (home != stages_[i].homes.end())
        own = transport_->copy(own, transport_->work(static_cast<int32_t>(i)),
                               Stream::of_thread(home->second.device()));
      if (sum.defined()) {  // on the callers' streams
        transport_->hand_over(sum, callers);
        transport_->hand_over(own, callers);
      }
      sum = sum.defined() ? at::add(sum, own) : std::move(own);
    }
    stages_[i].gradients.clear();
    stages_[i].bound.clear();
  }
  round(gradients.parameters, callers);
  phase_ = Phase::idle;
  backward_plan_.reset();
  kept_ = retain_;
  return gradients;
}

void MiniBatch::round(Tensors& gradients, const std::vector<Stream>& callers) const {
  for (size_t i = 0; i < stages_.size(); ++i) {
    const std::vector<int64_t>& indices = plan_->stages[i].parameters;
    for (size_t j = 0; j < indices.size(); ++j) {
      at::Tensor& gradient = gradients[indices[j]];
      const at::ScalarType dtype = stages_[i].parameters[j].scalar_type();
      if (!gradient.defined() || gradient.scalar_type() == dtype) continue;
      transport_->hand_over(gradient, callers);
      gradient = gradient.to(dtype);
    }
  }
}

const Segment& MiniBatch::segment_of_backward(const Action& action, const Link& link) const {
  if (backward_plan_ == plan_) return *link.segment;
  return *backward_plan_->stages[action.stage].chains[action.microbatch].front();
}

void MiniBatch::open(const Pass& pass, Stage& stage, const Link& link, Watch& watch) {
  const PortedProgram& program = pass.backward;
  bind(stage, program.program);
  size_t defined = 0;
  bool foreign = false;
  for (int64_t index : pass.gradients) {
    defined += stage.gradients[index].defined() ? 1 : 0;
    foreign = foreign || stage.foreign.count(index) != 0;
  }
  if (foreign && defined == pass.gradients.size()) {
    // Added to in place: the uses of a parameter add up one by one, also after those of a micro-batch in Python.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (int64_t index : pass.gradients) {
      if (stage.foreign.erase(index) != 0) stage.gradients[index] = stage.gradients[index].clone();
    }
    foreign = false;
  }
  if (foreign || (defined != 0 && defined != pass.gradients.size())) {
    stage.open.emplace(*program.program, stage.gradients.size());
  } else {
    stage.open.emplace(*program.program, stage.gradients, defined == 0);
  }
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    if (program.inputs[i].role != Role::tangent) stage.open->run.take(i, find(program.inputs[i], link, {}));
  }
  stage.open->run.execute(Part::early, &watch);
}

void MiniBatch::finish(const Pass& pass, Stage& stage, Watch& watch) {
  Open& open = *stage.open;
  open.run.execute(Part::rest, &watch);
  open.run.finish();
  if (!open.apart.empty()) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (int64_t index : pass.gradients) {
      at::Tensor& gradient = stage.gradients[index];
      gradient = gradient.defined() ? at::add(gradient, open.apart[index]) : open.apart[index];
    }
  }
  stage.open.reset();
}

void MiniBatch::backward(const Action& action, Watch& watch) {
  Stage& stage = stages_[action.stage];
  Cell& cell = stage.cells[action.microbatch];
  const bool whole = action.kind == ActionKind::backward;
  const bool inputs = whole || action.kind == ActionKind::backward_inputs;
  const bool weights = whole || action.kind == ActionKind::backward_weights;
  // The parts of a backward lie apart at a stage's ends alone: its last segment's begins early, and its first one's ends
  // late.
  if (action.kind == ActionKind::recompute) {
    const Link& last = cell.links.back();
    const Segment& segment = segment_of_backward(action, last);
    if (!segment.python && segment.pass->backward.program) open(*segment.pass, stage, last, watch);
  }
  if (inputs) {
    Skips& skips = skips_[action.microbatch];
    Tensors tangents = std::move(cell.tangents);
    for (size_t i = cell.links.size(); i-- > 0;) {
      Link& link = cell.links[i];
      fetch(link.segment->stashes, skips, action.stage);
      if (link.returns) pop_gradients(*link.segment, *link.returns, skips, tangents);
      tangents = link.segment->python
                     ? backward_in_python(action, stage, link, tangents)
                     : backward_lowered(action, stage, link, std::move(tangents), whole || i > 0, watch);
      if (link.takes) stash_gradients(*link.segment, *link.takes, skips, tangents);
      put_down(link.segment->pops, skips, action.stage);
    }
    cell.input_gradients = std::move(tangents);
  }
  if (!weights) return;
  if (stage.open) finish(*segment_of_backward(action, cell.links.front()).pass, stage, watch);
  if (!retain_) cell.links.clear();
}

Tensors MiniBatch::backward_lowered(const Action& action, Stage& stage, Link& link, Tensors tangents,
                                    bool whole, Watch& watch) {
  if (dynamic()) {
    tangents.resize(std::max(tangents.size(), link.segment->tangents.size()));
    const bool any = std::any_of(tangents.begin(), tangents.end(), [](const auto& t) { return t.defined(); });
    if (!any || !link.segment->expects(tangents)) stage.open.reset();
    if (!any) return {};
    if (!link.segment->expects(tangents)) {
      const StagePlan& plan = plan_->stages[action.stage];
      link.segment = plan.instead(*link.segment, action.microbatch, tangents);
      plan.chains[action.microbatch].clear();  // the next forward expects what came
    }
  }
  const Pass& pass = *segment_of_backward(action, link).pass;
  const PortedProgram& program = pass.backward;
  if (!program.program) return {};  // nothing from here on needs a gradient
  if (!stage.open) open(pass, stage, link, watch);
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    if (program.inputs[i].role == Role::tangent)
      stage.open->run.take(i, find(program.inputs[i], link, tangents));
  }
  stage.open->run.execute(Part::results, &watch);
  const Tensors results = stage.open->run.outputs();
  Tensors gradients;
  for (size_t i = 0; i < results.size(); ++i) put(gradients, program.outputs[i].index, results[i]);
  if (whole) finish(pass, stage, watch);
  return gradients;
}

Tensors MiniBatch::backward_in_python(const Action& action, Stage& stage, Link& link,
                                      const Tensors& tangents) {
  const Segment& segment = *link.segment;
  Tensors gradients;
  for (int64_t index : segment.parameters) gradients.push_back(stage.gradients[index]);
  Tensors inputs = segment.python->backward(link.kept, tangents, gradients, retain_, action.name());
  for (size_t i = 0; i < gradients.size(); ++i) {
    const int64_t index = segment.parameters[i];
    stage.gradients[index] = std::move(gradients[i]);
    stage.foreign.insert(index);
  }
  return inputs;
}

}  // namespace gpipe_fast
