#include "pipeline/captured.h"

#include "device/failure.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <map>
#include <utility>

namespace gpipe_fast {
namespace {

std::vector<const void*> addresses_of(const Tensors& tensors) {
  std::vector<const void*> addresses;
  addresses.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) addresses.push_back(tensor.const_data_ptr());
  return addresses;
}

Tensors aliases_of(const Tensors& tensors, const GraphMaker::Alias& alias) {
  Tensors aliases;
  aliases.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) aliases.push_back(alias(tensor));
  return aliases;
}

// Copies on one device, which one call enqueues.
struct DeviceCopies {
  Tensors from, to;
};

}  // namespace

CapturedMiniBatch::CapturedMiniBatch(std::shared_ptr<MiniBatch> minibatch)
    : minibatch_(std::move(minibatch)) {}

// After a capture that failed, the programs still hold memory of the graph.
CapturedMiniBatch::~CapturedMiniBatch() {
  for (StageState& stage : minibatch_->stages_) stage.release_programs();
}

void CapturedMiniBatch::begin_forward(std::vector<Tensors> microbatches) {
  minibatch_->begin_forward(std::move(microbatches));
  for (const StageState& stage : minibatch_->stages_) initial_buffers_.push_back(stage.forward.buffers);
}

void CapturedMiniBatch::end_forward(const GraphMaker::Alias& alias) {
  minibatch_->phase_ = MiniBatch::Phase::idle;
  minibatch_->can_run_backward_ = true;
  minibatch_->output_memory_.reset();
  stage_tensors_.clear();
  for (StageState& stage : minibatch_->stages_) {
    StageTensors tensors_of_stage{aliases_of(stage.parameters, alias),
                                  aliases_of(stage.forward.buffers, alias),
                                  stage.reached,
                                  stage.new_versions,
                                  stage.microbatch_states,
                                  {},
                                  {},
                                  addresses_of(stage.module_buffers)};
    for (MicroBatchState& microbatch_state : tensors_of_stage.microbatch_states) {
      microbatch_state.copy_done = {};  // recorded during the capture, so invalid outside it
      for (SegmentContext& context : microbatch_state.contexts) {
        for (Tensors* tensors : {&context.inputs, &context.buffers, &context.saved, &context.shared})
          *tensors = aliases_of(*tensors, alias);
      }
    }
    stage_tensors_.push_back(std::move(tensors_of_stage));
    stage.release_programs();
    stage.forward.snapshots.clear();
  }
}

void CapturedMiniBatch::end_backward(const GraphMaker::Alias& alias) {
  for (size_t i = 0; i < stage_tensors_.size(); ++i) {
    StageState& stage = minibatch_->stages_[i];
    stage_tensors_[i].gradients = aliases_of(stage.backward.gradients, alias);
    for (const MicroBatchState& microbatch_state : stage.microbatch_states)
      stage_tensors_[i].input_gradients.push_back(aliases_of(microbatch_state.input_gradients, alias));
    stage.release_programs();
  }
}

void CapturedMiniBatch::release() {
  for (size_t i = 0; i < stage_tensors_.size(); ++i) {
    StageState& stage = minibatch_->stages_[i];
    stage.parameters = stage_tensors_[i].parameters;
    stage.microbatch_states.clear();
    stage.forward = {};
    stage.backward = {};
  }
}

bool CapturedMiniBatch::has_same_addresses(const MiniBatch& other) const {
  for (size_t i = 0; i < stage_tensors_.size(); ++i) {
    const StageState& target = other.stages_[i];
    const StageState& own = minibatch_->stages_[i];
    for (size_t j = 0; j < target.parameters.size(); ++j) {
      const auto original = own.originals.find(static_cast<int64_t>(j));
      const at::Tensor& parameter = original == own.originals.end() ? own.parameters[j] : original->second;
      if (target.parameters[j].const_data_ptr() != parameter.const_data_ptr()) return false;
    }
    for (size_t j = 0; j < target.module_buffers.size(); ++j) {
      const at::Tensor& buffer = target.module_buffers[j];
      if (!buffer.is_same(own.module_buffers[j]) ||
          buffer.const_data_ptr() != stage_tensors_[i].buffer_addresses[j])
        return false;
    }
  }
  return true;
}

void CapturedMiniBatch::write_keys_of(MiniBatch& other, size_t stage) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensors keys{other.host_keys(stage)};
  minibatch_->stages_[stage].keys.copy_(keys.front(), /*non_blocking=*/true);
  free_shared(keys);
}

void CapturedMiniBatch::share_forward(MiniBatch& other, std::shared_ptr<const void> owner) const {
  other.memory_owner_ = std::move(owner);
  for (size_t i = 0; i < stage_tensors_.size(); ++i) {
    StageState& target = other.stages_[i];
    // These include the copies of replicated parameters, which the graph writes.
    target.parameters = stage_tensors_[i].parameters;
    target.forward.buffers = stage_tensors_[i].buffers;
    target.reached = stage_tensors_[i].reached;
    target.new_versions = stage_tensors_[i].new_versions;
    target.microbatch_states = stage_tensors_[i].microbatch_states;
  }
}

void CapturedMiniBatch::copy_backward(MiniBatch& other) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::map<c10::DeviceIndex, DeviceCopies> devices;
  for (size_t i = 0; i < stage_tensors_.size(); ++i) {
    const StageTensors& tensors_of_stage = stage_tensors_[i];
    StageState& target = other.stages_[i];
    target.backward.gradients.assign(tensors_of_stage.gradients.size(), {});
    for (size_t j = 0; j < tensors_of_stage.gradients.size(); ++j) {
      const at::Tensor& gradient = tensors_of_stage.gradients[j];
      if (!gradient.defined()) continue;
      // A copy, because the next replay overwrites the gradient.
      at::Tensor& copy = target.backward.gradients[j] = at::empty_like(gradient);
      DeviceCopies& copies = devices[target.device.index()];
      copies.from.push_back(gradient);
      copies.to.push_back(copy);
    }
    for (size_t m = 0; m < target.microbatch_states.size(); ++m) {
      target.microbatch_states[m].tangents.clear();
      target.microbatch_states[m].input_gradients = tensors_of_stage.input_gradients[m];
      target.microbatch_states[m].contexts.clear();  // the graph has overwritten the tensors that they kept
    }
  }
  for (auto& [device, copies] : devices) at::_foreach_copy_(copies.to, copies.from, /*non_blocking=*/true);
  other.gradients_on_callers_ = true;
}

std::optional<c10::Storage> CapturedMiniBatch::hold_arena(size_t stage) const {
  const StagePlan& plan = minibatch_->plan()->stages[stage];
  std::shared_ptr<Arena> arena;  // shared by all programs of the stage
  int64_t bytes = 0;
  for (const Chain& chain : plan.chains) {
    for (const auto& segment : chain) {
      if (auto own = segment->arena()) arena = std::move(own);
      bytes = std::max(bytes, segment->scratch_bytes());
    }
  }
  if (!arena || bytes == 0) return std::nullopt;
  arena->hold(bytes, plan.device);
  return arena->storage();
}

}  // namespace gpipe_fast
