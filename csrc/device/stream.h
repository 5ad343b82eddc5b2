// Streams and stream events: the order in which a device executes work that several threads enqueue. On the
// CPU, where work is complete when a call returns, they do nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>
#include <vector>

namespace gpipe_fast {

class Stream;

// A stream event: a point in the work of a stream. It completes when all work enqueued before it has. Copies share it.
class StreamEvent {
 public:
  // An event of the CPU, which is complete.
  StreamEvent() = default;
  explicit StreamEvent(const Stream& stream);

  // Blocks the calling thread until the event completes.
  void synchronize() const;
  bool is_complete() const;

  // While a `Timing` lives, the calling thread makes timed events, which take the device a little longer.
  class Timing {
   public:
    Timing();
    ~Timing();
    Timing(const Timing&) = delete;
    Timing& operator=(const Timing&) = delete;
  };
  bool is_timed() const;
  // Returns the time from another event to this one, both timed and of one device. Blocks until both complete.
  int64_t nanoseconds_since(const StreamEvent& other) const;
  at::Device device() const;

 private:
  friend class Stream;
  std::shared_ptr<c10::Event> event_;  // from a pool, returned to it by the deleter, unless it is timed
};

// Creates a stream on a device. The stream lives as long as the process.
using StreamFactory = c10::Stream (*)(at::Device device);
// Registers the function that creates streams. Called while libraries are loaded; without one, PyTorch's pool is used.
bool register_stream_factory(StreamFactory make);

class Stream {
 public:
  // Returns the calling thread's current stream of a device.
  static Stream current_on(at::Device device);
  // Takes a stream for exclusive use until `release()`; PyTorch's own pool hands out each stream several
  // times. A stream that is given back still finishes its work.
  static Stream acquire(at::Device device);
  static void release(const Stream& stream);

  at::Device device() const { return device_; }
  // Returns PyTorch's stream. Must not be called for the CPU.
  c10::Stream torch_stream() const { return stream_.value(); }
  bool is_cpu() const { return !stream_; }
  bool operator==(const Stream& other) const { return device_ == other.device_ && stream_ == other.stream_; }

  // Makes later work on this stream begin only after a stream event, usually of another stream.
  void wait(const StreamEvent& event) const;
  // Records that work already on this stream uses a tensor's memory. Even if the tensor is freed, its memory
  // is not reused before that work has finished.
  void record_use(const at::Tensor& tensor) const;

  // While a `KeepAlive` lives, it owns the tensors that `record_use()` receives on its streams, instead of recording
  // them with the allocator. For streams that are being captured: an allocator cannot query when their work
  // has finished.
  class KeepAlive {
   public:
    explicit KeepAlive(std::vector<Stream> streams);
    ~KeepAlive();
    KeepAlive(const KeepAlive&) = delete;
    KeepAlive& operator=(const KeepAlive&) = delete;

   private:
    friend class Stream;
    const std::vector<Stream> streams_;
    std::vector<at::Tensor> tensors_;
  };

  // A guard: makes a stream and its device current in the calling thread, and restores the previous ones at the end.
  class Guard {
   public:
    explicit Guard(const Stream& stream);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    std::optional<c10::impl::VirtualGuardImpl> impl_;
    std::optional<at::Device> device_;  // the previous device and stream
    std::optional<c10::Stream> stream_;
  };

 private:
  friend class StreamEvent;
  Stream(at::Device device, std::optional<c10::Stream> stream) : device_(device), stream_(stream) {}

  at::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace gpipe_fast
