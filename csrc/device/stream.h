// Streams and moments: in which order a device does what several threads ask of it. On the CPU, where work is done when
// a call returns, there is nothing to them.
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

// A point in the work of a stream: what was put on it before. Copies are the same one.
class Moment {
 public:
  // The CPU's: now.
  Moment() = default;
  explicit Moment(const Stream& stream);

  // Until it has come.
  void synchronize() const;

 private:
  friend class Stream;
  std::shared_ptr<c10::Event> event_;  // from a pool, and back to it
};

// Makes a stream of a device, which lives as long as the process.
using StreamMaker = c10::Stream (*)(at::Device device);
// Called while libraries are loaded; torch's pool stands in where nothing was offered.
bool offer_streams(StreamMaker make);

class Stream {
 public:
  // The one that the calling thread puts work on.
  static Stream of_thread(at::Device device);
  // Takes a stream that nobody else uses until it is given back. PyTorch's own pool deals out each stream several times. A
  // stream that is given back still finishes its work.
  static Stream take(at::Device device);
  static void give_back(const Stream& stream);

  at::Device device() const { return device_; }
  // PyTorch's; not of the CPU.
  c10::Stream whole() const { return stream_.value(); }
  bool is_cpu() const { return !stream_; }
  bool operator==(const Stream& other) const { return device_ == other.device_ && stream_ == other.stream_; }

  // What is put on it from now on begins after a moment of another.
  void wait(const Moment& moment) const;
  // Work that is on it now uses the memory of a tensor, so nobody else's must come into it before that is done, also if
  // the tensor is let go of.
  void uses(const at::Tensor& tensor) const;

  // While one of these lives, what is used on its streams is held on to instead, whoever lets go of it: for streams that
  // are captured, of which an allocator cannot ask when they are done.
  class Holding {
   public:
    explicit Holding(std::vector<Stream> streams);
    ~Holding();
    Holding(const Holding&) = delete;
    Holding& operator=(const Holding&) = delete;

   private:
    friend class Stream;
    const std::vector<Stream> streams_;
    std::vector<at::Tensor> held_;
  };

  // Makes it the calling thread's, and its device, as long as it lives.
  class Current {
   public:
    explicit Current(const Stream& stream);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    std::optional<c10::impl::VirtualGuardImpl> impl_;
    std::optional<at::Device> device_;  // what they were
    std::optional<c10::Stream> stream_;
  };

 private:
  friend class Moment;
  Stream(at::Device device, std::optional<c10::Stream> stream) : device_(device), stream_(stream) {}

  at::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace gpipe_fast
