// Recorded events of one stage's worker, in a ring buffer that grows up to a limit.
#pragma once

#include "engine/engine.h"

#include <cstdint>
#include <vector>

namespace gpipe_fast {

class Recorder {
 public:
  // Discards all events. From now on keeps the latest `size` events; 0 turns recording off.
  void resize(int64_t size) {
    limit_ = static_cast<size_t>(size);
    events_ = {};
    count_ = 0;
  }
  bool enabled() const { return limit_ > 0; }
  void add(const Event& event) {
    if (events_.size() < limit_) {
      events_.push_back(event);
    } else {
      events_[count_ % limit_] = event;
    }
    ++count_;
  }
  std::vector<Event> latest() const {
    std::vector<Event> result;
    for (size_t i = count_ - events_.size(); i < count_; ++i) result.push_back(events_[i % limit_]);
    return result;
  }

 private:
  std::vector<Event> events_;
  size_t limit_ = 0;
  size_t count_ = 0;
};

}  // namespace gpipe_fast
