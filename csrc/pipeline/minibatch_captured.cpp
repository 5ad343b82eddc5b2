// Mini-batches that a graph computes.
#include "pipeline/minibatch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>

#include <set>
#include <utility>

namespace gpipe_fast {
namespace {

std::vector<const void*> addresses_of(const Tensors& tensors) {
  std::vector<const void*> addresses;
  addresses.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) addresses.push_back(tensor.const_data_ptr());
  return addresses;
}

// Tensors of their own with the same elements. All of one device, on the calling thread's stream.
Tensors copies_of(const Tensors& tensors) {
  Tensors copies(tensors.size()), from, to;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    copies[i] = at::empty_like(tensors[i]);
    from.push_back(tensors[i]);
    to.push_back(copies[i]);
  }
  if (!to.empty()) at::_foreach_copy_(to, from, /*non_blocking=*/true);
  return copies;
}

}  // namespace

void MiniBatch::freeze() {
  phase_ = Phase::idle;
  kept_ = true;
  for (Stage& stage : stages_) {
    stage.buffer_addresses = addresses_of(stage.module_buffers);
    stage.bound.clear();
    stage.noted.clear();
  }
}

bool MiniBatch::same_memory(const MiniBatch& captured) const {
  for (size_t i = 0; i < stages_.size(); ++i) {
    const Stage& own = stages_[i];
    const Stage& other = captured.stages_[i];
    for (size_t j = 0; j < own.parameters.size(); ++j) {
      const auto original = other.homes.find(static_cast<int64_t>(j));
      const at::Tensor& was = original == other.homes.end() ? other.parameters[j] : original->second;
      if (own.parameters[j].const_data_ptr() != was.const_data_ptr()) return false;
    }
    for (size_t j = 0; j < own.module_buffers.size(); ++j) {
      if (!own.module_buffers[j].is_same(other.module_buffers[j]) ||
          own.module_buffers[j].const_data_ptr() != other.buffer_addresses[j])
        return false;
    }
  }
  return true;
}

void MiniBatch::draw_for(MiniBatch& captured, size_t stage) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  captured.stages_[stage].keys.copy_(draw_keys(stage), /*non_blocking=*/true);
}

void MiniBatch::take_forward(const MiniBatch& captured) {
  for (size_t i = 0; i < stages_.size(); ++i) {
    // The copies of parameters among them, which the graph writes too.
    stages_[i].parameters = captured.stages_[i].parameters;
    stages_[i].cells = captured.stages_[i].cells;
    stages_[i].buffers = captured.stages_[i].buffers;
    for (Cell& cell : stages_[i].cells) cell.there = {};  // a moment of the capture
  }
  num_inputs_ = captured.num_inputs_;
}

void MiniBatch::take_backward(const MiniBatch& captured, size_t stage) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Stage& own = stages_[stage];
  const Stage& other = captured.stages_[stage];
  own.gradients = copies_of(other.gradients);  // the next mini-batch's are made in the same place
  for (size_t m = 0; m < own.cells.size(); ++m) {
    own.cells[m].tangents.clear();
    own.cells[m].input_gradients = other.cells[m].input_gradients;
    if (!retain_) own.cells[m].links.clear();
  }
}

std::vector<c10::Storage> MiniBatch::arenas() const {
  std::vector<c10::Storage> storages;
  std::set<const Arena*> seen;
  for (const StagePlan& stage : plan_->stages) {
    for (const Chain& chain : stage.chains) {
      for (const auto& segment : chain) {
        for (const PortedProgram* ported : {&segment->pass->forward, &segment->pass->backward}) {
          if (!ported->program) continue;
          const std::shared_ptr<Arena>& arena = ported->program->arena();
          if (seen.insert(arena.get()).second && arena->bytes() > 0) storages.push_back(arena->storage());
        }
      }
    }
  }
  return storages;
}

}  // namespace gpipe_fast
