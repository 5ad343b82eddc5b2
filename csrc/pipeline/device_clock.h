// The times of recorded actions on devices that execute them later than the host enqueues them.
#pragma once

#include "device/stream.h"
#include "engine/engine.h"
#include "transport/transport.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace gpipe_fast {

// Relates the clocks of the stages' devices to the host's steady clock: for each device, a stream event and the host's
// time when it completed, which is known within some microseconds.
class DeviceClock {
 public:
  // Blocks until the devices have completed the work of the stages' streams.
  DeviceClock(const Transport& transport, int32_t num_stages);
  // Returns when a stream event completed, in nanoseconds of the steady clock; blocks until it has. The event must be
  // timed (see StreamEvent::Timing).
  int64_t at(const StreamEvent& event) const;

 private:
  struct Origin {
    StreamEvent event;
    int64_t nanoseconds;
  };
  std::vector<Origin> origins_;
};

// The times of an action. A send ends when its copy is enqueued, and the tensor arrives later.
class StreamTimes final : public DeviceTimes {
 public:
  StreamTimes(std::shared_ptr<const DeviceClock> clock, StreamEvent begin, StreamEvent end,
              StreamEvent arrival);
  Times get() const override;

 private:
  std::shared_ptr<const DeviceClock> clock_;
  StreamEvent begin_, end_, arrival_;
};

}  // namespace gpipe_fast
