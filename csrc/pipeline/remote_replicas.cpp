// The sum of the gradients of a process's stages over their replicas, which other processes run for other samples.
//
// It starts after the process's last backward, while other processes still run backwards. Gradients are copied to
// buckets, and then are parts of them. The sum of one bucket is under way while the next one is filled:
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
#include <ATen/ops/zeros.h>

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
std::vector<Bucket> buckets_of(const Tensors& gradients, const std::vector<int64_t>& tied,
                               const std::vector<int64_t>& gathered) {
  const auto has = [](const std::vector<int64_t>& positions, int64_t position) {
    return std::find(positions.begin(), positions.end(), position) != positions.end();
  };
  std::vector<Bucket> buckets;
  std::map<at::ScalarType, Bucket> open;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& gradient = gradients[i];
    const auto position = static_cast<int64_t>(i);
    if (!gradient.defined() || gradient.numel() == 0 || has(gathered, position)) continue;
    if (has(tied, position)) {
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

// Returns the part of a bucket for the gradient of a parameter. It has the same strides in all replicas: those of the
// parameter, if this process has a gradient of the same shape, and not a term of the gradient of a larger parameter.
at::Tensor part_of(const at::Tensor& bucket, int64_t offset, const at::Tensor& parameter,
                   const at::Tensor& gradient) {
  const at::Tensor part = bucket.narrow(0, offset, gradient.numel());
  const bool alike = gradient.sizes() == parameter.sizes();
  if (!alike || !parameter.is_non_overlapping_and_dense()) return part.view(gradient.sizes());
  return part.as_strided(parameter.sizes(), parameter.strides());
}

// A row of a gradient along its first dimension.
int64_t row_numel(const at::Tensor& gradient) { return gradient.numel() / gradient.size(0); }

// Returns the part of a row of the matrix below for a replica's share of a gradient. As those of torch.chunk, the first
// shares have `rows` each.
at::Tensor share_of(const at::Tensor& row, int64_t offset, const at::Tensor& gradient, int64_t rows,
                    int64_t replica) {
  std::vector<int64_t> sizes = gradient.sizes().vec();
  sizes[0] = std::clamp<int64_t>(gradient.size(0) - replica * rows, 0, rows);
  return row.narrow(0, offset, sizes[0] * row_numel(gradient)).view(sizes);
}

}  // namespace

void RemoteStages::sum_replicas() {
  const auto& actions = owned_.plan.step ? owned_.plan.step : owned_.plan.backward;
  if (channels_->num_replicas() == 1 || !actions) return;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (StageState& stage : owned_.stages) {
    if (is_remote(stage.index)) continue;
    if (stage.latest_rank != actions->of(stage.index).back().rank) return;  // the rest was cancelled
  }
  std::vector<std::pair<const Stream*, Arrivals>> sums;  // by stage
  for (StageState& stage : owned_.stages) {
    if (is_remote(stage.index) || stage.backward.gradients.empty()) continue;
    stage.release_programs();  // which refer to the gradients
    auto& [work, own] = sums.emplace_back(&owned_.transport.work(stage.index), Arrivals());
    const Stream::Guard current(*work);
    begin_sums_of_gathered(stage, own);
    begin_sums(stage, own);
  }
  for (const auto& [work, own] : sums) {
    const Stream::Guard current(*work);
    for (const auto& sum : own) sum->wait(kAfterAllActions);
  }
}

void RemoteStages::begin_sums(StageState& stage, Arrivals& sums) const {
  Tensors& gradients = stage.backward.gradients;
  std::vector<int64_t> tied;
  for (const Tie& tie : owned_.plan.ties) {
    if (tie.own.front().first == stage.index) tied.push_back(tie.own.front().second);
  }
  const std::vector<int64_t>& gathered = owned_.plan.stages[stage.index].gathered_parameters;
  for (const Bucket& bucket : buckets_of(gradients, tied, gathered)) {
    const at::Tensor all = at::empty({bucket.numel}, gradients[bucket.positions.front()].options());
    int64_t offset = 0;
    for (int64_t position : bucket.positions) {
      at::Tensor part = part_of(all, offset, stage.parameters[position], gradients[position]);
      part.copy_(gradients[position]);
      gradients[position] = std::move(part);
      offset += gradients[position].numel();
    }
    if (!owned_.plan.step) all.div_(channels_->num_replicas());  // before the sum, which could overflow
    sums.push_back(channels_->sum_replicas(all.is_complex() ? at::view_as_real(all) : all, kAfterAllActions));
  }
}

// The gradients of gathered parameters, by dtype, make a matrix with a row for each replica:
//
//              parameter 2          parameter 5
//   row 0    rows 0 to 3         |  rows 0 and 1
//   row 1    rows 4 to 6, zeros  |  row 2, zeros
void RemoteStages::begin_sums_of_gathered(StageState& stage, Arrivals& sums) const {
  const int64_t num_replicas = channels_->num_replicas();
  std::map<at::ScalarType, std::vector<int64_t>> by_dtype;
  for (int64_t position : owned_.plan.stages[stage.index].gathered_parameters) {
    const at::Tensor& gradient = stage.backward.gradients[position];
    if (gradient.defined()) by_dtype[gradient.scalar_type()].push_back(position);
  }
  for (const auto& [dtype, positions] : by_dtype) {
    const auto rows_of = [&](const at::Tensor& gradient) {
      return (gradient.size(0) + num_replicas - 1) / num_replicas;
    };
    int64_t length = 0, offset = 0;
    for (int64_t position : positions) {
      const at::Tensor& gradient = stage.backward.gradients[position];
      length += rows_of(gradient) * row_numel(gradient);
    }
    const at::TensorOptions options = stage.backward.gradients[positions.front()].options();
    const at::Tensor all = at::zeros({num_replicas, length}, options), own = at::empty({length}, options);
    for (int64_t position : positions) {
      const at::Tensor gradient = std::move(stage.backward.gradients[position]);
      const int64_t rows = rows_of(gradient);
      for (int64_t replica = 0; replica < num_replicas; ++replica) {
        const at::Tensor share = share_of(all[replica], offset, gradient, rows, replica);
        if (share.numel() > 0) share.copy_(gradient.narrow(0, replica * rows, share.size(0)));
      }
      stage.backward.gradients[position] = share_of(own, offset, gradient, rows, channels_->replica());
      offset += rows * row_numel(gradient);
    }
    if (!owned_.plan.step) all.div_(num_replicas);
    const auto real = [](const at::Tensor& tensor) {
      return tensor.is_complex() ? at::view_as_real(tensor).flatten(-2) : tensor;
    };
    sums.push_back(channels_->sum_rows(real(all), real(own), kAfterAllActions));
  }
}

}  // namespace gpipe_fast
