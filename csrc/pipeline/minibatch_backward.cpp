// The backward of a mini-batch.
#include "check.h"
#include "pipeline/minibatch.h"
#include "pipeline/skip.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>

#include <utility>

namespace gpipe_fast {

namespace {

// Makes gradients strided, which programs require.
void make_strided(Tensors& tangents) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (at::Tensor& tangent : tangents) {
    if (tangent.defined() && tangent.layout() != at::kStrided) tangent = tangent.to_dense();
  }
}

}  // namespace

void MiniBatch::begin_backward(std::vector<Tensors> microbatches, bool retain) {
  GPIPE_CHECK(
      can_run_backward_,
      "the forward's saved tensors were freed; for a second backward, pass retain_graph=True to the first");
  GPIPE_CHECK(static_cast<int64_t>(microbatches.size()) == plan_->num_microbatches(),
              "the backward needs gradients for ", plan_->num_microbatches(), " micro-batches, got ",
              microbatches.size());
  for (StageState& stage : stages_) {
    for (const MicroBatchState& microbatch_state : stage.microbatch_states) {
      for (const SegmentContext& context : microbatch_state.contexts)
        context.segment->check_buffers(stage, context);
    }
  }
  for (StageState& stage : stages_) stage.release_programs();
  set_gradients(std::move(microbatches), retain);
  thread_state_.emplace(plan_->num_threads);
  phase_ = Phase::backward;
}

void MiniBatch::begin_step(std::vector<Tensors> microbatches, std::vector<Tensors> given,
                           std::vector<Tensors> gradients) {
  begin_forward(std::move(microbatches));
  for (size_t m = 0; m < given.size(); ++m) {
    for (size_t i = 0; i < given[m].size(); ++i) {
      Skip& skip = skips_[m].at(plan_->given_skips.at(i));
      skip.tensor = std::move(given[m][i]);
      skip.stage = stages_.back().index;  // the caller gives it on the last stage's device
    }
  }
  set_gradients(std::move(gradients), /*retain=*/false);
}

void MiniBatch::set_gradients(std::vector<Tensors> microbatches, bool retain) {
  for (StageState& stage : stages_) {
    stage.backward = {Tensors(stage.parameters.size())};
    stage.latest_rank = -1;
    stage.retains_graph = retain;
  }
  for (size_t m = 0; m < microbatches.size(); ++m) {
    stages_.back().microbatch_states[m].tangents = std::move(microbatches[m]);
  }
  used_no_fallback_ = true;
  gradients_on_callers_ = false;
}

void MiniBatch::release() {
  can_run_backward_ = false;
  for (StageState& stage : stages_) {
    stage.retains_graph = false;
    for (MicroBatchState& microbatch_state : stage.microbatch_states) microbatch_state.contexts.clear();
  }
  memory_owner_.reset();
}

MiniBatch::Gradients MiniBatch::end_backward(const std::vector<Stream>& caller_streams) {
  Gradients gradients;
  for (MicroBatchState& microbatch_state : stages_.front().microbatch_states)
    gradients.inputs.push_back(std::move(microbatch_state.input_gradients));
  gradients.parameters.resize(num_parameters_);
  // The gradients of a parameter that several stages use are summed in the order of a backward, the last stage first.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i = stages_.size(); i-- > 0;) {
    const std::vector<int64_t>& indices = plan_->stages[i].parameters;
    for (size_t j = 0; j < indices.size(); ++j) {
      at::Tensor& sum = gradients.parameters[indices[j]];
      at::Tensor& own = stages_[i].backward.gradients[j];
      if (!own.defined()) continue;
      const auto original = stages_[i].originals.find(static_cast<int64_t>(j));
      if (original != stages_[i].originals.end())
        own = transport_->copy(
            own, gradients_on_callers_ ? caller_streams[i] : transport_->work(static_cast<int32_t>(i)),
            Stream::current_on(original->second.device()));
      if (sum.defined()) {  // the sum runs on the callers' streams
        transport_->hand_over(sum, caller_streams);
        transport_->hand_over(own, caller_streams);
      }
      sum = sum.defined() ? at::add(sum, own) : std::move(own);
    }
    stages_[i].backward = {};
    stages_[i].release_programs();
  }
  round_to_dtype(gradients.parameters, caller_streams);
  phase_ = Phase::idle;
  can_run_backward_ = stages_.front().retains_graph;
  return gradients;
}

void MiniBatch::round_to_dtype(Tensors& gradients, const std::vector<Stream>& caller_streams) const {
  for (size_t i = 0; i < stages_.size(); ++i) {
    const std::vector<int64_t>& indices = plan_->stages[i].parameters;
    for (size_t j = 0; j < indices.size(); ++j) {
      at::Tensor& gradient = gradients[indices[j]];
      const at::ScalarType dtype = stages_[i].parameters[j].scalar_type();
      if (!gradient.defined() || gradient.scalar_type() == dtype) continue;
      transport_->hand_over(gradient, caller_streams);
      gradient = gradient.to(dtype);
    }
  }
}

void MiniBatch::backward(const Action& action, CancellationToken& token) {
  StageState& stage = stages_[action.stage];
  MicroBatchState& microbatch_state = stage.microbatch_states[action.microbatch];
  const auto call = [&](SegmentContext& context) { return SegmentCall{action, stage, context, token}; };
  // Only the two ends of a stage split their backward: the last segment may start before the boundary gradient
  // arrives, and the first segment may finish after the input gradients are sent.
  switch (action.kind) {
    case ActionKind::recompute:
      return microbatch_state.contexts.back().segment->open(call(microbatch_state.contexts.back()));
    case ActionKind::backward_inputs:
      return backward_inputs(action, /*with_parameters=*/false, token);
    case ActionKind::backward:
      backward_inputs(action, /*with_parameters=*/true, token);
      break;
    default:
      microbatch_state.contexts.front().segment->finish(call(microbatch_state.contexts.front()));
  }
  if (!stage.retains_graph) microbatch_state.contexts.clear();
}

void MiniBatch::backward_inputs(const Action& action, bool with_parameters, CancellationToken& token) {
  StageState& stage = stages_[action.stage];
  MicroBatchState& microbatch_state = stage.microbatch_states[action.microbatch];
  Skips& skips = skips_[action.microbatch];
  Tensors tangents = std::move(microbatch_state.tangents);
  if (remote_) remote_->take_skip_gradients(action);
  for (size_t i = microbatch_state.contexts.size(); i-- > 0;) {
    SegmentContext& context = microbatch_state.contexts[i];
    fetch_skips(context.segment->stashes, skips, action.stage);
    if (context.output_form) pop_gradients(*context.segment, *context.output_form, skips, tangents);
    tangents =
        run_segment_backward({action, stage, context, token}, std::move(tangents), with_parameters || i > 0);
    if (context.input_form) stash_gradients(*context.segment, *context.input_form, skips, tangents);
    mark_ready(context.segment->pops, skips, action.stage);
  }
  microbatch_state.input_gradients = std::move(tangents);
}

Tensors MiniBatch::run_segment_backward(const SegmentCall& call, Tensors tangents, bool with_parameters) {
  SegmentContext& context = call.context;
  if (std::none_of(tangents.begin(), tangents.end(), [](const auto& t) { return t.defined(); })) {
    call.stage.backward.open.reset();
    return {};
  }
  if (context.segment->is_lowered()) make_strided(tangents);
  if (remote_) remote_->conform_gradients(call.action, tangents);
  if (!context.segment->accepts_gradients(tangents)) {
    call.stage.backward.open.reset();
    const StagePlan& plan = plan_->stages[call.stage.index];
    context.segment = plan.fallback(call.action.microbatch, *context.segment, tangents);
    context.segment->check_buffers(call.stage, context);
    used_no_fallback_ = false;
  }
  // Between an I and its W, a segment that does not defer weights may not leave its backward open.
  const bool is_complete = plan_->defers_weights && !context.segment->defers_weights();
  return context.segment->backward(call, tangents, with_parameters || is_complete);
}

}  // namespace gpipe_fast
