#include "transport.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <utility>

namespace gpipe_fast {
namespace {

constexpr int kWays = 3;

// From the first element of a tensor to its last, as bytes.
at::Tensor bytes_of(const at::Tensor& tensor) {
  int64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  const at::Tensor flat = tensor.as_strided({elements}, {1});
  return flat.view(at::kByte);
}

// A copy with the same strides. Of what two devices do it, the calling thread's streams do it.
at::Tensor copied(const at::Tensor& tensor, at::Device device) {
  if (tensor.numel() == 0)
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  const at::Tensor source = bytes_of(tensor.resolve_conj().resolve_neg());
  // Memory of the host is pinned where a device reads or writes it.
  const bool to_host = device.is_cpu();
  at::Tensor target = at::empty({source.numel()}, source.options().device(device).pinned_memory(to_host));
  target.copy_(tensor.is_cpu() ? source.pin_memory() : source, /*non_blocking=*/true);
  return target.view(tensor.scalar_type()).as_strided(tensor.sizes(), tensor.strides());
}

// Before what is put on a stream, or done by the thread itself, from now on.
void await(const Stream& stream, const Moment& moment) {
  if (stream.is_cpu()) {
    moment.synchronize();
  } else {
    stream.wait(moment);
  }
}

// Copies tensors on streams of their own, between when they are made and when another stream uses them.
Moment carry(std::vector<at::Tensor>& tensors, const Stream& out, const Moment& made, const Stream& in,
             const Stream& used) {
  out.wait(made);
  const Stream::Current on_sender(out);
  const Stream::Current on_receiver(in);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    at::Tensor there = copied(tensor, used.device());
    out.uses(tensor);
    used.uses(there);
    tensor = std::move(there);
  }
  // Copies from one device to another end on the stream of the second, by what torch does.
  return used.is_cpu() ? Moment(out) : Moment(in);
}

}  // namespace

Transport::Transport(const std::vector<at::Device>& devices) {
  for (const at::Device& device : devices) {
    is_cpu_ = is_cpu_ && device.is_cpu();
    Stage stage{Stream::other(device), Stream::other(device), {}};
    for (int way = 0; way < kWays; ++way) stage.in.push_back(Stream::other(device));
    stages_.push_back(std::move(stage));
  }
}

std::vector<Stream> Transport::streams() const {
  std::vector<Stream> all;
  for (const Stage& stage : stages_) {
    all.push_back(stage.work);
    all.push_back(stage.out);
    all.insert(all.end(), stage.in.begin(), stage.in.end());
  }
  return all;
}

std::vector<Stream> Transport::callers() const {
  std::vector<Stream> found;
  if (is_cpu_) return found;
  for (const Stage& stage : stages_) found.push_back(Stream::of_thread(stage.work.device()));
  return found;
}

void Transport::enter(const std::vector<Stream>& callers) const {
  if (is_cpu_) return;
  for (size_t i = 0; i < stages_.size(); ++i) stages_[i].work.wait(Moment(callers[i]));
}

void Transport::leave(const std::vector<Stream>& callers, bool failed) const {
  if (is_cpu_) return;
  for (size_t i = 0; i < stages_.size(); ++i) {
    callers[i].wait(Moment(stages_[i].work));
    if (failed) callers[i].wait(Moment(stages_[i].out));
  }
}

void Transport::hand_over(const at::Tensor& tensor, const std::vector<Stream>& callers) const {
  if (is_cpu_ || !tensor.defined()) return;
  for (const Stream& caller : callers) caller.uses(tensor);
}

Moment Transport::send(std::vector<at::Tensor>& tensors, int32_t sender, const Moment& made, int32_t receiver,
                       Way way) const {
  const Stage& from = stages_[sender];
  const Stage& to = stages_[receiver];
  if (from.work.device() == to.work.device()) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined()) to.work.uses(tensor);
    }
    return made;
  }
  return carry(tensors, from.out, made, to.in[static_cast<size_t>(way)], to.work);
}

at::Tensor Transport::copy(const at::Tensor& tensor, const Stream& made, const Stream& used) const {
  const auto of = [this](at::Device device) {
    return std::find_if(stages_.begin(), stages_.end(),
                        [&](const Stage& stage) { return stage.work.device() == device; });
  };
  const auto from = of(made.device()), to = of(used.device());
  if (made.device() == used.device() || from == stages_.end() || to == stages_.end())
    return tensor.to(tensor.options().device(used.device()), /*non_blocking=*/false, /*copy=*/true);
  std::vector<at::Tensor> tensors{tensor};
  await(used, carry(tensors, from->out, Moment(made), to->in.front(), used));
  return tensors.front();
}

void Transport::receive(int32_t receiver, const Moment& there) const { await(stages_[receiver].work, there); }

}  // namespace gpipe_fast
