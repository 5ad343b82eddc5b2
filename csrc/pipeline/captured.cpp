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

Tensors aliases_of(const Tensors& tensors, const GraphMaker::Alias& alias) {
  Tensors aliases;
  aliases.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) aliases.push_back(alias(tensor));
  return aliases;
}

// Copies on one device, to be made by one call.
struct Copies {
  Tensors from, to;
};

}  // namespace

CapturedMiniBatch::CapturedMiniBatch(std::shared_ptr<MiniBatch> minibatch)
    : minibatch_(std::move(minibatch)) {}

void CapturedMiniBatch::end_forward(const GraphMaker::Alias& alias) {
  minibatch_->phase_ = MiniBatch::Phase::idle;
  minibatch_->kept_ = true;
  given_.clear();
  for (StageState& stage : minibatch_->stages_) {
    Given given{aliases_of(stage.parameters, alias),
                aliases_of(stage.forward.buffers, alias),
                stage.reached,
                stage.cells,
                {},
                {},
                addresses_of(stage.module_buffers)};
    for (Cell& cell : given.cells) {
      cell.there = {};  // recorded during the capture, so invalid outside it
      for (Link& link : cell.links) {
        for (Tensors* tensors : {&link.inputs, &link.buffers, &link.saved})
          *tensors = aliases_of(*tensors, alias);
      }
    }
    given_.push_back(std::move(given));
    stage.release_programs();
    stage.forward.noted.clear();
  }
}

void CapturedMiniBatch::end_backward(const GraphMaker::Alias& alias) {
  for (size_t i = 0; i < given_.size(); ++i) {
    StageState& stage = minibatch_->stages_[i];
    given_[i].gradients = aliases_of(stage.backward.gradients, alias);
    for (const Cell& cell : stage.cells)
      given_[i].input_gradients.push_back(aliases_of(cell.input_gradients, alias));
    stage.release_programs();
  }
}

void CapturedMiniBatch::release() {
  for (size_t i = 0; i < given_.size(); ++i) {
    StageState& stage = minibatch_->stages_[i];
    stage.parameters = given_[i].parameters;
    stage.cells.clear();
    stage.forward = {};
    stage.backward = {};
  }
}

bool CapturedMiniBatch::has_memory_of(const MiniBatch& other) const {
  for (size_t i = 0; i < given_.size(); ++i) {
    const StageState& its = other.stages_[i];
    const StageState& own = minibatch_->stages_[i];
    for (size_t j = 0; j < its.parameters.size(); ++j) {
      const auto original = own.homes.find(static_cast<int64_t>(j));
      const at::Tensor& was = original == own.homes.end() ? own.parameters[j] : original->second;
      if (its.parameters[j].const_data_ptr() != was.const_data_ptr()) return false;
    }
    for (size_t j = 0; j < its.module_buffers.size(); ++j) {
      const at::Tensor& buffer = its.module_buffers[j];
      if (!buffer.is_same(own.module_buffers[j]) || buffer.const_data_ptr() != given_[i].places[j])
        return false;
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
  for (size_t i = 0; i < given_.size(); ++i) {
    StageState& its = other.stages_[i];
    // These include the copies of replicated parameters, which the graph writes.
    its.parameters = given_[i].parameters;
    its.forward.buffers = given_[i].buffers;
    its.reached = given_[i].reached;
    its.cells = given_[i].cells;
  }
}

void CapturedMiniBatch::give_backward(MiniBatch& other) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::map<c10::DeviceIndex, Copies> devices;
  for (size_t i = 0; i < given_.size(); ++i) {
    const Given& given = given_[i];
    StageState& its = other.stages_[i];
    its.backward.gradients.assign(given.gradients.size(), {});
    for (size_t j = 0; j < given.gradients.size(); ++j) {
      const at::Tensor& gradient = given.gradients[j];
      if (!gradient.defined()) continue;
      // A copy, because the next replay overwrites the gradient.
      at::Tensor& copy = its.backward.gradients[j] = at::empty_like(gradient);
      Copies& copies = devices[its.device.index()];
      copies.from.push_back(gradient);
      copies.to.push_back(copy);
    }
    for (size_t m = 0; m < its.cells.size(); ++m) {
      its.cells[m].tangents.clear();
      its.cells[m].input_gradients = given.input_gradients[m];
      its.cells[m].links.clear();  // the graph has overwritten the tensors that they kept
    }
  }
  for (auto& [device, copies] : devices) at::_foreach_copy_(copies.to, copies.from, /*non_blocking=*/true);
  other.gradients_on_callers_ = true;
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
