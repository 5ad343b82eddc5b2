#include "device/stream.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace gpipe_fast {
namespace {

struct Less {
  bool operator()(const at::Device& a, const at::Device& b) const {
    return std::make_pair(a.type(), a.index()) < std::make_pair(b.type(), b.index());
  }
};

// Unused objects for reuse, by device.
template <class Kept>
class Pool {
 public:
  // Returns nullopt if the pool has none for this device.
  std::optional<Kept> take(at::Device device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Kept>& free = free_[device];
    if (free.empty()) return std::nullopt;
    Kept kept = std::move(free.back());
    free.pop_back();
    return kept;
  }
  void give_back(at::Device device, Kept kept) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[device].push_back(std::move(kept));
  }

 private:
  std::mutex mutex_;
  std::map<at::Device, std::vector<Kept>, Less> free_;
};

// The pool is never destroyed, because events cannot be destroyed after the driver has shut down. It is keyed
// by device because an event belongs to the device of the first stream it is recorded on.
Pool<std::unique_ptr<c10::Event>>& events() {
  static auto* const made = new Pool<std::unique_ptr<c10::Event>>;
  return *made;
}

std::shared_ptr<c10::Event> take_event(at::Device device) {
  std::unique_ptr<c10::Event> event = events().take(device).value_or(nullptr);
  if (!event) event = std::make_unique<c10::Event>(device.type());
  return {event.release(),
          [device](c10::Event* done) { events().give_back(device, std::unique_ptr<c10::Event>(done)); }};
}

// Streams are never destroyed: allocators identify memory by stream, and would mistake a new stream at the
// same address for the destroyed one.
Pool<c10::Stream>& streams() {
  static auto* const made = new Pool<c10::Stream>;
  return *made;
}

StreamMaker& offered() {
  static StreamMaker make = nullptr;
  return make;
}

std::atomic<int> num_holding{0};
std::mutex holding_mutex;  // guards `all_holding()` and every `held_`
std::vector<Stream::Holding*>& all_holding() {
  static auto* const made = new std::vector<Stream::Holding*>;
  return *made;
}

}  // namespace

bool offer_streams(StreamMaker make) {
  offered() = make;
  return true;
}

Stream::Holding::Holding(std::vector<Stream> streams) : streams_(std::move(streams)) {
  const std::lock_guard<std::mutex> lock(holding_mutex);
  all_holding().push_back(this);
  num_holding.store(static_cast<int>(all_holding().size()), std::memory_order_release);
}

Stream::Holding::~Holding() {
  const std::lock_guard<std::mutex> lock(holding_mutex);
  all_holding().erase(std::find(all_holding().begin(), all_holding().end(), this));
  num_holding.store(static_cast<int>(all_holding().size()), std::memory_order_release);
}

Moment::Moment(const Stream& stream) {
  if (stream.is_cpu()) return;
  event_ = take_event(stream.device());
  event_->record(*stream.stream_);
}

void Moment::synchronize() const {
  if (event_) event_->synchronize();
}

Stream Stream::of_thread(at::Device device) {
  if (device.is_cpu()) return {device, std::nullopt};
  return {device, c10::impl::VirtualGuardImpl(device.type()).getStream(device)};
}

Stream Stream::take(at::Device device) {
  if (device.is_cpu()) return {device, std::nullopt};
  if (const std::optional<c10::Stream> free = streams().take(device)) return {device, free};
  if (offered() != nullptr && device.is_cuda()) return {device, offered()(device)};
  return {device, c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)};
}

void Stream::give_back(const Stream& stream) {
  if (!stream.is_cpu()) streams().give_back(stream.device(), stream.whole());
}

void Stream::wait(const Moment& moment) const {
  if (stream_ && moment.event_) moment.event_->block(*stream_);
}

void Stream::uses(const at::Tensor& tensor) const {
  if (!stream_ || tensor.device() != device_ || tensor.numel() == 0) return;
  if (num_holding.load(std::memory_order_acquire) > 0) {
    const std::lock_guard<std::mutex> lock(holding_mutex);
    for (Holding* holding : all_holding()) {
      const std::vector<Stream>& streams = holding->streams_;
      if (std::find(streams.begin(), streams.end(), *this) == streams.end()) continue;
      holding->held_.push_back(tensor);
      return;
    }
  }
  c10::impl::VirtualGuardImpl(device_.type()).recordDataPtrOnStream(tensor.storage().data_ptr(), *stream_);
}

Stream::Current::Current(const Stream& stream) {
  if (stream.is_cpu()) return;
  impl_.emplace(stream.device().type());
  device_ = impl_->exchangeDevice(stream.device());
  stream_ = impl_->exchangeStream(*stream.stream_);
}

Stream::Current::~Current() {
  if (!impl_) return;
  impl_->exchangeStream(*stream_);
  impl_->uncheckedSetDevice(*device_);  // a device failure is reported elsewhere
}

}  // namespace gpipe_fast
