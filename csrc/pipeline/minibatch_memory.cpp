// Memory of a mini-batch in bytes, for tests and for out-of-memory errors.
#include "pipeline/minibatch.h"

#include <algorithm>
#include <iomanip>
#include <set>
#include <sstream>
#include <string>

namespace gpipe_fast {
namespace {

// Sums the bytes of storages; a storage that several tensors share counts once.
class Bytes {
 public:
  void add(const Tensors& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || !seen_.insert(tensor.storage().unsafeGetStorageImpl()).second) continue;
      sum_ += static_cast<int64_t>(tensor.storage().nbytes());
    }
  }
  int64_t sum() const { return sum_; }

 private:
  std::set<const void*> seen_;
  int64_t sum_ = 0;
};

int64_t bytes_of(const Tensors& tensors) {
  Bytes bytes;
  bytes.add(tensors);
  return bytes.sum();
}

// Returns the bytes of the elements, not of the storages: the first stage's boundary tensors are views of the whole
// input.
int64_t own_bytes(const Tensors& tensors) {
  int64_t sum = 0;
  for (const at::Tensor& tensor : tensors)
    sum += tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  return sum;
}

std::string text(int64_t bytes) {
  constexpr double kMiB = 1 << 20;
  std::ostringstream out;
  if (bytes >= kMiB) {
    out << std::fixed << std::setprecision(1) << static_cast<double>(bytes) / kMiB << " MiB";
  } else {
    out << bytes << " bytes";
  }
  return out.str();
}

// Returns the size of the scratch memory that all programs of a stage share.
int64_t arena_bytes(const StagePlan& plan) {
  for (const Chain& chain : plan.chains) {
    for (const auto& segment : chain) {
      if (const auto arena = segment->arena()) return arena->bytes();
    }
  }
  return 0;
}

}  // namespace

int64_t MiniBatch::kept_bytes() const {
  Bytes bytes;
  for (const StageState& stage : stages_) {
    for (const Cell& cell : stage.cells) {
      for (const Link& link : cell.links) {
        for (const Tensors* tensors : {&link.inputs, &link.buffers, &link.saved}) bytes.add(*tensors);
      }
    }
  }
  return bytes.sum();
}

std::string MiniBatch::memory_of(int32_t index) const {
  const StageState& stage = stages_.at(index);
  const StagePlan& plan = plan_->stages.at(index);
  int64_t boundary = 0;  // maximum over the micro-batches
  Bytes saved;
  for (const Cell& cell : stage.cells) {
    int64_t own = own_bytes(cell.arrived.tensors);
    for (const Link& link : cell.links) {
      own += own_bytes(link.inputs);
      saved.add(link.saved);
    }
    boundary = std::max(boundary, own);
  }
  const size_t number = stage.cells.size();
  std::ostringstream out;
  out << "stage " << index << " on " << plan.device << " holds " << text(bytes_of(stage.parameters))
      << " of parameters, " << text(bytes_of(stage.backward.gradients)) << " of their gradients so far, "
      << text(boundary) << " of boundary tensors for each of " << number << " micro-batches ("
      << text(static_cast<int64_t>(number) * boundary) << " in total), " << text(saved.sum())
      << " of saved activations so far, and " << text(arena_bytes(plan))
      << " of scratch memory; to reduce this, use more chunks, checkpoint='always', or a balance with fewer "
         "layers in this stage";
  return out.str();
}

}  // namespace gpipe_fast
