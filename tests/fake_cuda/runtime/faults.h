// Faults of the runtime, planted in a step, so that tests can show that they are noticed.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

// One at a time, a word and perhaps a number N, counted from 0 within the marks "begin" and "end":
//   dropped N    a stream does not wait for the event that it is told to wait for
//   hosted N     the host waits for it instead
//   stale N      an event is not recorded again, so that who waits for it waits for what was before
//   misplaced N  a copy from one device to another is made on the stream that computed last
//   sticky N     something that is put on a stream accesses memory illegally: every call fails from then on
//   early        events are found finished whenever somebody asks, and are not
class Faults {
 public:
  // In place of what was planted before; while nothing runs.
  void plant(const std::string& text) {
    const size_t end = text.find(' ');
    kind_ = text.substr(0, end);
    number_ = end == std::string::npos ? -1 : std::atol(text.c_str() + end);
    seen_ = 0;
  }

  // Of every mark.
  void mark(const char* text) { inside_ = std::strncmp(text, "begin", 5) == 0; }

  // Whether a call is to go wrong so.
  bool now(const char* kind) { return inside_ && kind_ == kind && (number_ < 0 || seen_++ == number_); }

 private:
  std::string kind_;
  long number_ = -1;
  std::atomic<bool> inside_{false};
  std::atomic<long> seen_{0};
};
