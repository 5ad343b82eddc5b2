#include "device/stream.h"

#include "device/context.h"
#include "device/failure.h"

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
template <class Object>
class Pool {
 public:
  // Returns nullopt if the pool has none for this device.
  std::optional<Object> acquire(at::Device device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Object>& free = free_[device];
    if (free.empty()) return std::nullopt;
    Object object = std::move(free.back());
    free.pop_back();
    return object;
  }
  void release(at::Device device, Object object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[device].push_back(std::move(object));
  }

 private:
  std::mutex mutex_;
  std::map<at::Device, std::vector<Object>, Less> free_;
};

// The pool is never destroyed, because events cannot be destroyed after the driver has shut down. It is keyed
// by device because an event belongs to the device of the first stream it is recorded on.
Pool<std::unique_ptr<c10::Event>>& events() {
  static auto* const made = new Pool<std::unique_ptr<c10::Event>>;
  return *made;
}

std::shared_ptr<c10::Event> acquire_event(at::Device device) {
  std::unique_ptr<c10::Event> event = events().acquire(device).value_or(nullptr);
  if (!event) event = std::make_unique<c10::Event>(device.type());
  return {event.release(),
          [device](c10::Event* done) { events().release(device, std::unique_ptr<c10::Event>(done)); }};
}

// Streams are never destroyed: allocators identify memory by stream, and would mistake a new stream at the
// same address for the destroyed one.
Pool<c10::Stream>& streams() {
  static auto* const made = new Pool<c10::Stream>;
  return *made;
}

StreamFactory& registered() {
  static StreamFactory make = nullptr;
  return make;
}

ContextSetter& registered_context_setter() {
  static ContextSetter set = nullptr;
  return set;
}

thread_local int timing_depth = 0;

std::atomic<int> num_keep_alives{0};
std::mutex keep_alives_mutex;  // guards `keep_alives()` and every `tensors_`
std::vector<Stream::KeepAlive*>& keep_alives() {
  static auto* const made = new std::vector<Stream::KeepAlive*>;
  return *made;
}

}  // namespace

bool register_stream_factory(StreamFactory make) {
  registered() = make;
  return true;
}

bool register_context_setter(ContextSetter set) {
  registered_context_setter() = set;
  return true;
}

Stream::KeepAlive::KeepAlive(std::vector<Stream> streams) : streams_(std::move(streams)) {
  const std::lock_guard<std::mutex> lock(keep_alives_mutex);
  keep_alives().push_back(this);
  num_keep_alives.store(static_cast<int>(keep_alives().size()), std::memory_order_release);
}

Stream::KeepAlive::~KeepAlive() {
  const std::lock_guard<std::mutex> lock(keep_alives_mutex);
  keep_alives().erase(std::find(keep_alives().begin(), keep_alives().end(), this));
  num_keep_alives.store(static_cast<int>(keep_alives().size()), std::memory_order_release);
}

StreamEvent::StreamEvent(const Stream& stream) {
  if (stream.is_cpu()) return;
  event_ = timing_depth > 0
               ? std::make_shared<c10::Event>(stream.device().type(), c10::EventFlag::BACKEND_DEFAULT)
               : acquire_event(stream.device());
  event_->record(*stream.stream_);
}

StreamEvent::Timing::Timing() { ++timing_depth; }
StreamEvent::Timing::~Timing() { --timing_depth; }

bool StreamEvent::is_timed() const { return event_ && event_->flag() == c10::EventFlag::BACKEND_DEFAULT; }

int64_t StreamEvent::nanoseconds_since(const StreamEvent& other) const {
  other.synchronize();
  synchronize();
  return static_cast<int64_t>(other.event_->elapsedTime(*event_) * 1e6);  // from milliseconds
}

at::Device StreamEvent::device() const { return event_ ? event_->device() : at::Device(at::kCPU); }

void StreamEvent::synchronize() const {
  if (event_) event_->synchronize();
}

bool StreamEvent::is_complete() const { return !event_ || event_->query(); }

Stream Stream::current_on(at::Device device) {
  if (device.is_cpu()) return {device, std::nullopt};
  return {device, c10::impl::VirtualGuardImpl(device.type()).getStream(device)};
}

Stream Stream::acquire(at::Device device) {
  if (device.is_cpu()) return {device, std::nullopt};
  if (const std::optional<c10::Stream> free = streams().acquire(device)) return {device, free};
  if (registered() != nullptr && device.is_cuda()) return {device, registered()(device)};
  return {device, c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)};
}

void Stream::release(const Stream& stream) {
  if (!stream.is_cpu()) streams().release(stream.device(), stream.torch_stream());
}

void Stream::wait(const StreamEvent& event) const {
  if (stream_ && event.event_) event.event_->block(*stream_);
}

void Stream::record_use(const at::Tensor& tensor) const {
  if (!stream_ || tensor.device() != device_ || tensor.numel() == 0) return;
  if (num_keep_alives.load(std::memory_order_acquire) > 0) {
    const std::lock_guard<std::mutex> lock(keep_alives_mutex);
    for (KeepAlive* keep_alive : keep_alives()) {
      const std::vector<Stream>& streams = keep_alive->streams_;
      if (std::find(streams.begin(), streams.end(), *this) == streams.end()) continue;
      keep_alive->tensors_.push_back(tensor);
      return;
    }
  }
  note_shared(tensor);
  c10::impl::VirtualGuardImpl(device_.type()).recordDataPtrOnStream(tensor.storage().data_ptr(), *stream_);
}

Stream::Guard::Guard(const Stream& stream) {
  if (stream.is_cpu()) return;
  impl_.emplace(stream.device().type());
  device_ = impl_->exchangeDevice(stream.device());
  if (registered_context_setter() != nullptr && stream.device().is_cuda())
    registered_context_setter()(stream.device());
  stream_ = impl_->exchangeStream(*stream.stream_);
}

Stream::Guard::~Guard() {
  if (!impl_) return;
  impl_->exchangeStream(*stream_);
  impl_->uncheckedSetDevice(*device_);  // a device failure is reported elsewhere
}

}  // namespace gpipe_fast
