#include "pipeline/captured.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>

#include <map>
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

// Copies of one device, made by one call.
struct Copies {
  Tensors from, to;
};

}  // namespace

CapturedMiniBatch::CapturedMiniBatch(std::shared_ptr<MiniBatch> minibatch)
    : minibatch_(std::move(minibatch)) {}

void CapturedMiniBatch::freeze() {
  minibatch_->phase_ = MiniBatch::Phase::idle;
  minibatch_->kept_ = true;
  buffers_.clear();
  for (StageState& stage : minibatch_->stages_) {
    buffers_.push_back(addresses_of(stage.module_buffers));
    stage.release_programs();
    stage.forward.noted.clear();
  }
}

bool CapturedMiniBatch::has_memory_of(const MiniBatch& other) const {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const StageState& its = other.stages_[i];
    const StageState& own = minibatch_->stages_[i];
    for (size_t j = 0; j < its.parameters.size(); ++j) {
      const auto original = own.homes.find(static_cast<int64_t>(j));
      const at::Tensor& was = original == own.homes.end() ? own.parameters[j] : original->second;
      if (its.parameters[j].const_data_ptr() != was.const_data_ptr()) return false;
    }
    for (size_t j = 0; j < its.module_buffers.size(); ++j) {
      const at::Tensor& buffer = its.module_buffers[j];
      if (!buffer.is_same(own.module_buffers[j]) || buffer.const_data_ptr() != buffers_[i][j]) return false;
    }
  }
  return true;
}

void CapturedMiniBatch::draw_for(MiniBatch& other, size_t stage) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  minibatch_->stages_[stage].keys.copy_(other.draw_keys(stage), /*non_blocking=*/true);
}

void CapturedMiniBatch::give_forward(MiniBatch& other, std::shared_ptr<const void> owner) const {
  other.memory_owner_ = std::move(owner);
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const StageState& own = minibatch_->stages_[i];
    StageState& its = other.stages_[i];
    // The copies of parameters among them, which the graph writes too.
    its.parameters = own.parameters;
    its.forward.buffers = own.forward.buffers;
    its.reached = own.reached;
    its.cells = own.cells;
    for (Cell& cell : its.cells) cell.there = {};  // a moment of the capture
  }
}

void CapturedMiniBatch::give_backward(MiniBatch& other) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::map<c10::DeviceIndex, Copies> devices;
  for (size_t i = 0; i < other.stages_.size(); ++i) {
    const StageState& own = minibatch_->stages_[i];
    StageState& its = other.stages_[i];
    its.backward.gradients.assign(own.backward.gradients.size(), {});
    for (size_t j = 0; j < own.backward.gradients.size(); ++j) {
      const at::Tensor& gradient = own.backward.gradients[j];
      if (!gradient.defined()) continue;
      // The next mini-batch's is made in the same place.
      at::Tensor& copy = its.backward.gradients[j] = at::empty_like(gradient);
      devices[own.device.index()].from.push_back(gradient);
      devices[own.device.index()].to.push_back(copy);
    }
    for (size_t m = 0; m < its.cells.size(); ++m) {
      its.cells[m].tangents.clear();
      its.cells[m].input_gradients = own.cells[m].input_gradients;
      if (!its.retains) its.cells[m].links.clear();
    }
  }
  for (auto& [device, copies] : devices) at::_foreach_copy_(copies.to, copies.from, /*non_blocking=*/true);
  other.gradients_on_callers_ = true;
}

Tensors CapturedMiniBatch::tensors() const {
  Tensors all;
  const auto add = [&all](const Tensors& tensors) { all.insert(all.end(), tensors.begin(), tensors.end()); };
  for (const StageState& stage : minibatch_->stages_) {
    for (const Tensors* tensors : {&stage.parameters, &stage.forward.buffers, &stage.backward.gradients})
      add(*tensors);
    for (const Cell& cell : stage.cells) {
      add(cell.input_gradients);
      for (const Link& link : cell.links) {
        for (const Tensors* tensors : {&link.inputs, &link.buffers, &link.saved}) add(*tensors);
      }
    }
  }
  return all;
}

std::vector<c10::Storage> CapturedMiniBatch::arenas() const {
  std::vector<c10::Storage> storages;
  std::set<const Arena*> seen;
  for (const StagePlan& stage : minibatch_->plan()->stages) {
    for (const Chain& chain : stage.chains) {
      for (const auto& segment : chain) {
        const auto arena = segment->arena();
        if (arena && seen.insert(arena.get()).second && arena->bytes() > 0)
          storages.push_back(arena->storage());
      }
    }
  }
  return storages;
}

}  // namespace gpipe_fast
