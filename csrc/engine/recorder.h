// Recorded events of one stage's worker, in a preallocated ring buffer.
#pragma once

#include "engine/engine.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gpipe_fast {

class Recorder {
 public:
  // Discards all events. From now on keeps the latest `size` events; 0 turns recording off.
  void resize(int64_t size) {
    events_.assign(static_cast<size_t>(size), Event{});
    count_ = 0;
  }
  bool enabled() const { return !events_.empty(); }
  void add(const Event& event) { events_[count_++ % events_.size()] = event; }
  std::vector<Event> latest() const {
    std::vector<Event> result;
    for (size_t i = count_ - std::min(count_, events_.size()); i < count_; ++i) {
      result.push_back(events_[i % events_.size()]);
    }
    return result;
  }

 private:
  std::vector<Event> events_;
  size_t count_ = 0;
};

}  // namespace gpipe_fast
