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
int64_t element_bytes(const Tensors& tensors) {
  int64_t sum = 0;
  for (const at::Tensor& tensor : tensors)
    sum += tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  return sum;
}

std::string format_bytes(int64_t bytes) {
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
int64_t scratch_bytes(const StagePlan& plan) {
  int64_t bytes = 0;
  for (const Chain& chain : plan.chains) {
    for (const auto& segment : chain) bytes = std::max(bytes, segment->scratch_bytes());
  }
  return bytes;
}

}  // namespace

int64_t MiniBatch::kept_bytes() const {
  Bytes bytes;
  for (const StageState& stage : stages_) {
    for (const MicroBatchState& microbatch_state : stage.microbatch_states) {
      for (const SegmentContext& context : microbatch_state.contexts) {
        for (const Tensors* tensors :
             {&context.inputs, &context.buffers, &context.saved, &context.tangents, &context.held})
          bytes.add(*tensors);
      }
    }
  }
  return bytes.sum();
}

KeptBytes MiniBatch::kept(const Action& action) const {
  const StageState& stage = stages_[action.stage];
  const MicroBatchState& state = stage.microbatch_states[action.microbatch];
  KeptBytes kept{element_bytes(state.received.tensors)};
  for (const SegmentContext& context : state.contexts) {
    kept.scratch = std::max(kept.scratch, context.segment->scratch_bytes());
    (&context == &state.contexts.front() ? kept.boundary : kept.saved) += element_bytes(context.inputs);
    for (const Tensors* tensors : {&context.saved, &context.tangents, &context.held})
      kept.saved += element_bytes(*tensors);
    for (size_t i = 0; i < context.buffers.size(); ++i) {
      const at::Tensor& own = context.buffers[i];  // or the module's
      if (own.defined() && !own.is_same(stage.module_buffers[i]))
        kept.saved += static_cast<int64_t>(own.nbytes());
    }
  }
  return kept;
}

std::string MiniBatch::describe_memory(int32_t index) const {
  const StageState& stage = stages_.at(index);
  const StagePlan& plan = plan_->stages.at(index);
  int64_t boundary = 0;  // maximum over the micro-batches
  Bytes saved;
  for (const MicroBatchState& microbatch_state : stage.microbatch_states) {
    int64_t own = element_bytes(microbatch_state.received.tensors);
    for (const SegmentContext& context : microbatch_state.contexts) {
      own += element_bytes(context.inputs);
      for (const Tensors* tensors : {&context.saved, &context.tangents, &context.held}) saved.add(*tensors);
    }
    boundary = std::max(boundary, own);
  }
  const size_t number = stage.microbatch_states.size();
  std::ostringstream out;
  out << "stage " << index << " on " << plan.device << " holds " << format_bytes(bytes_of(stage.parameters))
      << " of parameters, ";
  if (const int64_t bytes = stage.parameter_casts().bytes(); bytes > 0)
    out << format_bytes(bytes) << " of parameters cast to other dtypes, ";
  out << format_bytes(bytes_of(stage.backward.gradients)) << " of their gradients so far, "
      << format_bytes(boundary) << " of boundary tensors for each of " << number << " micro-batches ("
      << format_bytes(static_cast<int64_t>(number) * boundary) << " in total), " << format_bytes(saved.sum())
      << " of saved activations so far, and " << format_bytes(scratch_bytes(plan))
      << " of scratch memory; to reduce this, use more chunks, checkpoint='always', or a balance with fewer "
         "layers in this stage";
  return out.str();
}

}  // namespace gpipe_fast
