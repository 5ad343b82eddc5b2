#include "transport/transport.h"

#include "device/failure.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <utility>

namespace gpipe_fast {
namespace {

constexpr int kNumDirections = 3;

// Makes later work on a stream wait for a stream event; on the CPU, blocks the calling thread until the event
// completes.
void await(const Stream& stream, const StreamEvent& event) {
  if (stream.is_cpu()) {
    event.synchronize();
  } else {
    stream.wait(event);
  }
}

// Allocates bytes on a device. Host memory is pinned, because a device copies into it.
at::Tensor allocate_bytes(int64_t bytes, at::Device device) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(device).pinned_memory(device.is_cpu()));
}

}  // namespace

Route choose(at::Device sender, at::Device receiver, TransportChoice choice) {
  const bool between_gpus = sender.is_cuda() && receiver.is_cuda() && copier() != nullptr;
  if (sender == receiver && (!between_gpus || choice == TransportChoice::automatic)) return Route::hand_over;
  if (!between_gpus) return Route::copy;
  if (choice == TransportChoice::pinned) return Route::pinned;
  return copier()->peer_access(sender, receiver).works ? Route::peer : Route::pinned;
}

std::string peer_fault(at::Device sender, at::Device receiver, TransportChoice choice) {
  if (choice == TransportChoice::pinned || choose(sender, receiver, choice) != Route::pinned) return "";
  return copier()->peer_access(sender, receiver).fault;
}

Transport::Transport(const std::vector<at::Device>& devices, TransportChoice choice, bool has_channels)
    : choice_(choice) {
  for (const at::Device device : devices) {
    is_cpu_ = is_cpu_ && device.is_cpu();
    if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) devices_.push_back(device);
  }
  const bool makes_copies = has_channels || devices_.size() > 1 ||
                            choose(devices_.front(), devices_.front(), choice) != Route::hand_over;
  for (const at::Device device : devices) {
    const Stream work = Stream::acquire(device);
    StageStreams stage{work, makes_copies ? Stream::acquire(device) : work, {}};
    for (int direction = 0; direction < kNumDirections; ++direction)
      stage.in.push_back(makes_copies ? Stream::acquire(device) : work);
    stages_.push_back(std::move(stage));
  }
}

Transport::~Transport() {
  try {
    // The rings' blocks must not be reused before their last use, which may be on any stage's work stream.
    for (const auto& [connection, ring] : rings_) {
      for (const StageStreams& stage : stages_) ring->keep_until(StreamEvent(stage.work));
    }
  } catch (const std::exception&) {
    // The device has failed, so no work runs there any more.
  }
  for (const Stream& stream : streams()) Stream::release(stream);
}

std::vector<Stream> Transport::streams() const {
  std::vector<Stream> all;
  for (const StageStreams& stage : stages_) {
    all.push_back(stage.work);
    if (stage.out == stage.work) continue;
    all.push_back(stage.out);
    all.insert(all.end(), stage.in.begin(), stage.in.end());
  }
  return all;
}

std::vector<Stream> Transport::caller_streams() const {
  std::vector<Stream> found;
  if (is_cpu_) return found;
  for (const StageStreams& stage : stages_) found.push_back(Stream::current_on(stage.work.device()));
  return found;
}

void Transport::begin_run(const std::vector<Stream>& caller_streams) const {
  if (is_cpu_) return;
  for (size_t i = 0; i < stages_.size(); ++i) stages_[i].work.wait(StreamEvent(caller_streams[i]));
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [connection, ring] : rings_) {
    if (connection.direction) ring->begin();
  }
}

void Transport::free_blocks() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [connection, ring] : rings_) ring->begin();
}

void Transport::end_run(const std::vector<Stream>& caller_streams, bool failed) const {
  if (is_cpu_) return;
  for (size_t i = 0; i < stages_.size(); ++i) {
    caller_streams[i].wait(StreamEvent(stages_[i].work));
    if (failed) caller_streams[i].wait(StreamEvent(stages_[i].out));
  }
}

void Transport::survive_failures() const noexcept {
  for (const at::Device device : devices_) survive_failure(device);
}

void Transport::check_alive() const {
  for (const at::Device device : devices_) gpipe_fast::check_alive(device);
}

void Transport::hand_over(const at::Tensor& tensor, const std::vector<Stream>& caller_streams) const {
  if (is_cpu_ || !tensor.defined()) return;
  for (const Stream& caller : caller_streams) caller.record_use(tensor);
}

StreamEvent Transport::send(std::vector<at::Tensor>& tensors, int32_t sender, const StreamEvent& ready,
                            int32_t receiver, Direction direction) const {
  const StageStreams& from = stages_[sender];
  const StageStreams& to = stages_[receiver];
  if (route(sender, receiver) == Route::hand_over) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined()) to.work.record_use(tensor);
    }
    return ready;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<CoalescedCopy> packed;
  from.out.wait(ready);
  if (direction == Direction::skip) {  // the sender may be running another action now
    const Stream::Guard on_sender(from.out);
    bool enqueued_work = false;
    packed = pack(tensors, /*coalesce_small=*/false, enqueued_work);
  } else {
    const Stream::Guard on_sender(from.work);
    bool enqueued_work = false;
    packed = pack(tensors, /*coalesce_small=*/true, enqueued_work);
    if (enqueued_work) from.out.wait(StreamEvent(from.work));
  }
  return enqueue_copies_or_survive(packed, tensors, {sender, receiver, direction}, to.work);
}

at::Tensor Transport::copy(const at::Tensor& tensor, const Stream& producer, const Stream& consumer) const {
  const auto stage_on = [this](at::Device device) {
    const auto found = std::find_if(stages_.begin(), stages_.end(),
                                    [&](const StageStreams& stage) { return stage.work.device() == device; });
    return static_cast<size_t>(found - stages_.begin());
  };
  const size_t from = stage_on(producer.device()), to = stage_on(consumer.device());
  if (producer.device() == consumer.device() || from == stages_.size() || to == stages_.size())
    return tensor.to(tensor.options().device(consumer.device()), /*non_blocking=*/false, /*copy=*/true);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> tensors{tensor};
  std::vector<CoalescedCopy> packed;
  stages_[from].out.wait(StreamEvent(producer));
  {
    const Stream::Guard on_sender(stages_[from].out);
    bool enqueued_work = false;
    packed = pack(tensors, /*coalesce_small=*/false, enqueued_work);
  }
  const Connection connection{static_cast<int32_t>(from), static_cast<int32_t>(to), std::nullopt};
  await(consumer, enqueue_copies_or_survive(packed, tensors, connection, consumer));
  return tensors.front();
}

void Transport::receive(int32_t receiver, const StreamEvent& copy_done) const {
  await(stages_[receiver].work, copy_done);
}

// The copies belong to nobody else yet, so they must not be freed on a failed device.
StreamEvent Transport::enqueue_copies_or_survive(const std::vector<CoalescedCopy>& packed,
                                                 std::vector<at::Tensor>& tensors,
                                                 const Connection& connection, const Stream& consumer) const {
  std::vector<at::Tensor> arrived;
  try {
    return enqueue_copies(packed, tensors, arrived, connection, consumer);
  } catch (...) {
    survive_failures();
    throw;
  }
}

// Enqueues the copies after the work already on the sender's out stream. Returns the event that completes them.
StreamEvent Transport::enqueue_copies(const std::vector<CoalescedCopy>& packed,
                                      std::vector<at::Tensor>& tensors, std::vector<at::Tensor>& arrived,
                                      const Connection& connection, const Stream& consumer) const {
  const Stream& out = stages_[connection.sender].out;
  const Stream& in = this->in(connection.receiver, connection.direction.value_or(Direction::forward));
  const Route copy_route = route(connection.sender, connection.receiver);
  {
    // Allocate on the in stream: the allocator reuses freed memory in the order of the stream it was allocated on.
    const Stream::Guard on_receiver(in);
    for (const CoalescedCopy& buffer : packed)
      arrived.push_back(allocate_bytes(buffer.bytes.numel(), consumer.device()));
    for (at::Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.numel() == 0)
        tensor =
            at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(consumer.device()));
    }
  }
  if (copy_route == Route::peer) out.wait(StreamEvent(in));
  for (size_t i = 0; i < packed.size(); ++i) {
    const at::Tensor& source = packed[i].bytes;
    switch (copy_route) {
      case Route::peer: {
        const Stream::Guard on_sender(out);
        copier()->copy(arrived[i], source, out.device());
        break;
      }
      case Route::pinned:
        ring(connection, out, in).enqueue_copies(source, arrived[i]);
        break;
      case Route::copy: {
        const Stream::Guard on_sender(out);
        const Stream::Guard on_receiver(in);
        arrived[i].copy_(source.is_cpu() ? source.pin_memory() : source, /*non_blocking=*/true);
        break;
      }
      case Route::hand_over:
        std::abort();  // unreachable: send() copies nothing on this route
    }
    // Recorded last, because freeing a tensor with recorded uses throws on a failed device.
    out.record_use(source);
    consumer.record_use(arrived[i]);
    if (consumer.is_cpu()) note_shared(arrived[i]);
    unpack(packed[i], arrived[i], tensors);
  }
  if (copy_route == Route::peer) in.wait(StreamEvent(out));
  // Copies to a GPU, PyTorch's own included, are complete for later work on the receiver's in stream.
  return consumer.is_cpu() ? StreamEvent(out) : StreamEvent(in);
}

PinnedRing& Transport::ring(const Connection& connection, const Stream& out, const Stream& in) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<PinnedRing>& found = rings_[connection];
  if (!found) found = std::make_unique<PinnedRing>(*copier(), out, in);
  return *found;
}

}  // namespace gpipe_fast
