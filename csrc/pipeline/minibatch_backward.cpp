// The backward of a mini-batch.
#include "check.h"
#include "pipeline/minibatch.h"
#include "pipeline/skip.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>

#include <algorithm>
#include <utility>

namespace gpipe_fast {

namespace {

// Makes gradients strided, and resolves conjugation and negation. Programs and autograd require this, and it makes the
// layouts comparable with those that a segment was lowered for.
void make_plain(Tensors& tangents) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (at::Tensor& tangent : tangents) {
    if (!tangent.defined()) continue;
    if (tangent.layout() != at::kStrided) tangent = tangent.to_dense();
    tangent = tangent.resolve_conj().resolve_neg();
  }
}

}  // namespace

void MiniBatch::begin_backward(std::vector<Tensors> microbatches, bool retain) {
  GPIPE_CHECK(
      kept_,
      "the forward's saved tensors were freed; for a second backward, pass retain_graph=True to the first");
  GPIPE_CHECK(static_cast<int64_t>(microbatches.size()) == plan_->num_microbatches(),
              "the backward needs gradients for ", plan_->num_microbatches(), " micro-batches, got ",
              microbatches.size());
  for (StageState& stage : stages_) {
    for (const Cell& cell : stage.cells) {
      for (const Link& link : cell.links) link.segment->check_buffers(stage);
    }
  }
  for (StageState& stage : stages_) {
    stage.backward = {Tensors(stage.parameters.size())};
    stage.retains = retain;
    stage.release_programs();
  }
  for (size_t m = 0; m < microbatches.size(); ++m) {
    stages_.back().cells[m].tangents = std::move(microbatches[m]);
  }
  surroundings_.emplace(plan_->num_threads);
  as_expected_ = true;
  gradients_on_callers_ = false;
  phase_ = Phase::backward;
}

void MiniBatch::release() {
  kept_ = false;
  for (StageState& stage : stages_) {
    stage.retains = false;
    for (Cell& cell : stage.cells) cell.links.clear();
  }
  memory_owner_.reset();
}

MiniBatch::Gradients MiniBatch::end_backward(const std::vector<Stream>& callers) {
  Gradients gradients;
  for (Cell& cell : stages_.front().cells) gradients.inputs.push_back(std::move(cell.input_gradients));
  gradients.parameters.resize(num_parameters_);
  // The gradients of a parameter that several stages use are summed in the order of a backward, the last stage first.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i = stages_.size(); i-- > 0;) {
    const std::vector<int64_t>& indices = plan_->stages[i].parameters;
    for (size_t j = 0; j < indices.size(); ++j) {
      at::Tensor& sum = gradients.parameters[indices[j]];
      at::Tensor& own = stages_[i].backward.gradients[j];
      if (!own.defined()) continue;
      const auto home = stages_[i].homes.find(static_cast<int64_t>(j));
      if (home != stages_[i].homes.end())
        own = transport_->copy(own,
                               gradients_on_callers_ ? callers[i] : transport_->work(static_cast<int32_t>(i)),
                               Stream::of_thread(home->second.device()));
      if (sum.defined()) {  // the sum runs on the callers' streams
        transport_->hand_over(sum, callers);
        transport_->hand_over(own, callers);
      }
      sum = sum.defined() ? at::add(sum, own) : std::move(own);
    }
    stages_[i].backward = {};
    stages_[i].release_programs();
  }
  round(gradients.parameters, callers);
  phase_ = Phase::idle;
  kept_ = stages_.front().retains;
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

void MiniBatch::backward(const Action& action, Watch& watch) {
  StageState& stage = stages_[action.stage];
  Cell& cell = stage.cells[action.microbatch];
  const auto visit = [&](Link& link) { return Visit{action, stage, link, watch}; };
  // Only the two ends of a stage split their backward: the last segment may start before the boundary gradient
  // arrives, and the first segment may finish after the input gradients are sent.
  switch (action.kind) {
    case ActionKind::recompute:
      return cell.links.back().segment->open(visit(cell.links.back()));
    case ActionKind::backward_inputs:
      return backward_inputs(action, /*whole=*/false, watch);
    case ActionKind::backward:
      backward_inputs(action, /*whole=*/true, watch);
      break;
    default:
      if (stage.backward.open) cell.links.front().segment->finish(visit(cell.links.front()));
  }
  if (!stage.retains) cell.links.clear();
}

void MiniBatch::backward_inputs(const Action& action, bool whole, Watch& watch) {
  StageState& stage = stages_[action.stage];
  Cell& cell = stage.cells[action.microbatch];
  Skips& skips = skips_[action.microbatch];
  Tensors tangents = std::move(cell.tangents);
  for (size_t i = cell.links.size(); i-- > 0;) {
    Link& link = cell.links[i];
    fetch(link.segment->stashes, skips, action.stage);
    if (link.returns) pop_gradients(*link.segment, *link.returns, skips, tangents);
    tangents = backward_of({action, stage, link, watch}, std::move(tangents), whole || i > 0);
    if (link.takes) stash_gradients(*link.segment, *link.takes, skips, tangents);
    put_down(link.segment->pops, skips, action.stage);
  }
  cell.input_gradients = std::move(tangents);
}

Tensors MiniBatch::backward_of(const Visit& visit, Tensors tangents, bool whole) {
  Link& link = visit.link;
  if (std::none_of(tangents.begin(), tangents.end(), [](const auto& t) { return t.defined(); })) {
    visit.stage.backward.open.reset();
    return {};
  }
  if (link.segment->is_lowered()) make_plain(tangents);
  if (!link.segment->expects(tangents)) {
    visit.stage.backward.open.reset();
    const StagePlan& plan = plan_->stages[visit.stage.index];
    link.segment = plan.stand_in(visit.action.microbatch, *link.segment, tangents);
    link.segment->check_buffers(visit.stage);
    as_expected_ = false;
  }
  return link.segment->backward(visit, tangents, whole);
}

}  // namespace gpipe_fast
