#include "pipeline/device_clock.h"

#include "check.h"

#include <chrono>
#include <limits>
#include <utility>

namespace gpipe_fast {
namespace {

// The thread may be interrupted between the event and a look at the clock, so the shortest of several tries counts.
constexpr int kNumTries = 8;

int64_t now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

}  // namespace

DeviceClock::DeviceClock(const Transport& transport, int32_t num_stages) {
  const StreamEvent::Timing timing;
  for (int32_t stage = 0; stage < num_stages; ++stage) {
    const Stream& stream = transport.work(stage);
    if (stream.is_cpu()) continue;
    const Stream::Guard current(stream);
    int64_t shortest = std::numeric_limits<int64_t>::max();
    Origin best{StreamEvent(), 0};
    for (int i = 0; i < kNumTries; ++i) {
      const int64_t before = now();
      StreamEvent event(stream);
      event.synchronize();
      const int64_t after = now();
      if (after - before >= shortest) continue;
      shortest = after - before;
      best = {std::move(event), before + shortest / 2};
    }
    origins_.push_back(std::move(best));
  }
}

int64_t DeviceClock::at(const StreamEvent& event) const {
  for (const Origin& origin : origins_) {
    if (origin.event.device() == event.device())
      return origin.nanoseconds + event.nanoseconds_since(origin.event);
  }
  GPIPE_CHECK(false, "no stage of the clock is on ", event.device());
}

StreamTimes::StreamTimes(std::shared_ptr<const DeviceClock> clock, StreamEvent begin, StreamEvent end,
                         StreamEvent arrival)
    : clock_(std::move(clock)),
      begin_(std::move(begin)),
      end_(std::move(end)),
      arrival_(std::move(arrival)) {}

DeviceTimes::Times StreamTimes::get() const {
  const int64_t end = clock_->at(end_);
  return {clock_->at(begin_), end, arrival_.is_timed() ? clock_->at(arrival_) : end};
}

}  // namespace gpipe_fast
