// The sum of a stage's gradients over its replicas, which other processes run for other samples.
//
// A stage starts it after its last backward, while earlier stages still run backwards. Gradients are copied to buckets,
// and then are parts of them. The sum of one bucket is under way while the next one is filled:
//
//   stage 1   B5  B6  B7 | fill bucket 0 | fill bucket 1 | wait
//                                        [--- sum of bucket 0 ---]
//   stage 0       B5    B6    B7 | fill ...
//
// A gradient that stages share has a bucket of its own, because the order of additions depends on the position in a
// bucket, and all of them need the same bits.
#include "pipeline/remote_stages.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <map>
#include <utility>

namespace gpipe_fast {
namespace {

// As in DistributedDataParallel. Smaller ones transfer slower, larger ones start later.
constexpr int64_t kBucketBytes = 25 << 20;

struct Bucket {
  std::vector<int64_t> positions;  // of the stage's parameters
  int64_t numel = 0;
};

// Returns the buckets of gradients, in an order that is the same for all replicas.
std::vector<Bucket> buckets_of(const Tensors& gradients, const std::vector<int64_t>& tied) {
  std::vector<Bucket> buckets;
  std::map<at::ScalarType, Bucket> open;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& gradient = gradients[i];
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const auto position = static_cast<int64_t>(i);
    if (std::find(tied.begin(), tied.end(), position) != tied.end()) {
      buckets.push_back({{position}, gradient.numel()});
      continue;
    }
    Bucket& bucket = open[gradient.scalar_type()];
    bucket.positions.push_back(position);
    bucket.numel += gradient.numel();
    if (bucket.numel * static_cast<int64_t>(gradient.element_size()) >= kBucketBytes)
      buckets.push_back(std::exchange(bucket, {}));
  }
  for (auto& [dtype, bucket] : open) {
    if (bucket.numel > 0) buckets.push_back(std::move(bucket));
  }
  return buckets;
}

// Returns the part of a bucket for the gradient of a parameter. It has the parameter's strides, in all replicas.
at::Tensor part_of(const at::Tensor& bucket, int64_t offset, const at::Tensor& parameter) {
  const at::Tensor part = bucket.narrow(0, offset, parameter.numel());
  if (!parameter.is_non_overlapping_and_dense()) return part.view(parameter.sizes());
  return part.as_strided(parameter.sizes(), parameter.strides());
}

}  // namespace

void RemoteStages::sum_replicas(int32_t index) {
  StageState& stage = owned_.stages[index];
  Tensors& gradients = stage.backward.gradients;
  const int32_t num_replicas = channels_->num_replicas();
  if (num_replicas == 1 || gradients.empty()) return;
  const Actions& actions = owned_.plan.step ? *owned_.plan.step : *owned_.plan.backward;
  if (stage.latest_rank != actions.of(index).back().rank) return;  // the rest was cancelled
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<int64_t> tied;
  for (const Tie& tie : owned_.plan.ties) tied.push_back(tie.own.front().second);
  stage.release_programs();  // which refer to the gradients
  std::vector<std::shared_ptr<Channels::Arrival>> sums;
  for (const Bucket& bucket : buckets_of(gradients, tied)) {
    const at::Tensor all = at::empty({bucket.numel}, gradients[bucket.positions.front()].options());
    int64_t offset = 0;
    for (int64_t position : bucket.positions) {
      at::Tensor part = part_of(all, offset, stage.parameters[position]);
      part.copy_(gradients[position]);
      gradients[position] = std::move(part);
      offset += gradients[position].numel();
    }
    if (!owned_.plan.step) all.div_(num_replicas);  // before the sum, which could overflow
    sums.push_back(channels_->sum_replicas(all.is_complex() ? at::view_as_real(all) : all, kAfterAllActions));
  }
  for (const auto& sum : sums) sum->wait(kAfterAllActions);
}

}  // namespace gpipe_fast
