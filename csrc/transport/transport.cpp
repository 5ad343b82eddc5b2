#include "transport/transport.h"

#include "check.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <utility>

namespace gpipe_fast {
namespace {

constexpr int kWays = 3;

// Makes later work on a stream wait for a stream event; on the CPU, blocks the calling thread until the event
// completes.
void await(const Stream& stream, const Moment& moment) {
  if (stream.is_cpu()) {
    moment.synchronize();
  } else {
    stream.wait(moment);
  }
}

// Allocates bytes on a device. Host memory is pinned, because a device copies into it.
at::Tensor room(int64_t bytes, at::Device device) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(device).pinned_memory(device.is_cpu()));
}

}  // namespace

std::optional<Route> choose(at::Device sender, at::Device receiver, Choice choice) {
  const bool gpus = sender.is_cuda() && receiver.is_cuda() && copier() != nullptr;
  if (sender == receiver && (!gpus || choice == Choice::automatic)) return Route::hand_over;
  if (!gpus) return Route::copy;
  if (choice == Choice::pinned) return Route::pinned;
  if (copier()->connects(sender, receiver)) return Route::peer;
  if (choice == Choice::peer) return std::nullopt;
  return Route::pinned;
}

Transport::Transport(const std::vector<at::Device>& devices, Choice choice) {
  std::vector<bool> copies(devices.size());
  for (size_t sender = 0; sender < devices.size(); ++sender) {
    for (size_t receiver = 0; receiver < devices.size(); ++receiver) {
      const std::optional<Route> found = choose(devices[sender], devices[receiver], choice);
      const bool neighbours = sender + 1 == receiver || receiver + 1 == sender;
      GPIPE_CHECK_ARG(found || !neighbours, "transport='peer', but ", devices[sender], " and ",
                      devices[receiver], " cannot access each other's memory");
      routes_.push_back(found.value_or(Route::pinned));
      if (routes_.back() != Route::hand_over) copies[sender] = copies[receiver] = true;
    }
  }
  for (size_t i = 0; i < devices.size(); ++i) {
    is_cpu_ = is_cpu_ && devices[i].is_cpu();
    const Stream work = Stream::take(devices[i]);
    Stage stage{work, copies[i] ? Stream::take(devices[i]) : work, {}};
    for (int way = 0; way < kWays; ++way) stage.in.push_back(copies[i] ? Stream::take(devices[i]) : work);
    stages_.push_back(std::move(stage));
  }
}

Transport::~Transport() {
  try {
    // The rings' blocks must not be reused before their last use, which may be on any stage's work stream.
    for (const auto& [edge, ring] : rings_) {
      for (const Stage& stage : stages_) ring->keep_until(Moment(stage.work));
    }
  } catch (const std::exception&) {
    // The device has failed, so no work runs there any more.
  }
  for (const Stream& stream : streams()) Stream::give_back(stream);
}

std::vector<Stream> Transport::streams() const {
  std::vector<Stream> all;
  for (const Stage& stage : stages_) {
    all.push_back(stage.work);
    if (stage.out == stage.work) continue;
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
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [edge, ring] : rings_) {
    if (edge.way) ring->begin();
  }
}

void Transport::free_blocks() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [edge, ring] : rings_) ring->begin();
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
  if (route(sender, receiver) == Route::hand_over) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined()) to.work.uses(tensor);
    }
    return made;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<Parcel> parcels;
  from.out.wait(made);
  if (way == Way::skip) {  // the sender may be running another action now
    const Stream::Current on_sender(from.out);
    bool computed = false;
    parcels = pack(tensors, /*together=*/false, computed);
  } else {
    const Stream::Current on_sender(from.work);
    bool computed = false;
    parcels = pack(tensors, /*together=*/true, computed);
    if (computed) from.out.wait(Moment(from.work));
  }
  return carry(parcels, tensors, {sender, receiver, way}, to.work);
}

at::Tensor Transport::copy(const at::Tensor& tensor, const Stream& made, const Stream& used) const {
  const auto of = [this](at::Device device) {
    const auto found = std::find_if(stages_.begin(), stages_.end(),
                                    [&](const Stage& stage) { return stage.work.device() == device; });
    return static_cast<size_t>(found - stages_.begin());
  };
  const size_t from = of(made.device()), to = of(used.device());
  if (made.device() == used.device() || from == stages_.size() || to == stages_.size())
    return tensor.to(tensor.options().device(used.device()), /*non_blocking=*/false, /*copy=*/true);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> tensors{tensor};
  std::vector<Parcel> parcels;
  stages_[from].out.wait(Moment(made));
  {
    const Stream::Current on_sender(stages_[from].out);
    bool computed = false;
    parcels = pack(tensors, /*together=*/false, computed);
  }
  const Edge edge{static_cast<int32_t>(from), static_cast<int32_t>(to), std::nullopt};
  await(used, carry(parcels, tensors, edge, used));
  return tensors.front();
}

void Transport::receive(int32_t receiver, const Moment& there) const { await(stages_[receiver].work, there); }

// Enqueues the copies after the work already on the sender's out stream. Returns the event that completes
// them.
Moment Transport::carry(const std::vector<Parcel>& parcels, std::vector<at::Tensor>& tensors,
                        const Edge& edge, const Stream& used) const {
  const Stream& out = stages_[edge.sender].out;
  const Stream& in = stages_[edge.receiver].in[static_cast<size_t>(edge.way.value_or(Way::forward))];
  const Route way = route(edge.sender, edge.receiver);
  std::vector<at::Tensor> arrived;
  {
    // Allocate on the in stream: the allocator reuses freed memory in the order of the stream it was
    // allocated on.
    const Stream::Current on_receiver(in);
    for (const Parcel& parcel : parcels) arrived.push_back(room(parcel.bytes.numel(), used.device()));
    for (at::Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.numel() == 0)
        tensor = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(used.device()));
    }
  }
  if (way == Route::peer) out.wait(Moment(in));
  for (size_t i = 0; i < parcels.size(); ++i) {
    const at::Tensor& source = parcels[i].bytes;
    out.uses(source);
    used.uses(arrived[i]);
    switch (way) {
      case Route::peer: {
        const Stream::Current on_sender(out);
        copier()->copy(arrived[i], source, out.device());
        break;
      }
      case Route::pinned:
        ring(edge, out, in).carry(source, arrived[i]);
        break;
      case Route::copy: {
        const Stream::Current on_sender(out);
        const Stream::Current on_receiver(in);
        arrived[i].copy_(source.is_cpu() ? source.pin_memory() : source, /*non_blocking=*/true);
        break;
      }
      case Route::hand_over:
        std::abort();  // unreachable: send() copies nothing on this route
    }
    unpack(parcels[i], arrived[i], tensors);
  }
  if (way == Route::peer) in.wait(Moment(out));
  // Copies to a GPU, torch's own included, are complete for later work on the receiver's in stream.
  return used.is_cpu() ? Moment(out) : Moment(in);
}

Ring& Transport::ring(const Edge& edge, const Stream& out, const Stream& in) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Ring>& found = rings_[edge];
  if (!found) found = std::make_unique<Ring>(*copier(), out, in);
  return *found;
}

}  // namespace gpipe_fast
