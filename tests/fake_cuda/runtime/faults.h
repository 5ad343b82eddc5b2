// Fault injection: faults of the runtime in a step, so that tests can show that the checks detect them.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

// One fault is planted at a time. N is the index of the affected call, counted from 0 between the marks "begin" and
// "end":
//   dropped N    cudaStreamWaitEvent does nothing
//   host_wait N  the host waits for the event instead of the stream
//   stale N      cudaEventRecord does nothing, so waits for the event wait for the previous record
//   misplaced N  a copy between devices is enqueued on the stream that computed last
//   sticky N     an enqueued operation accesses memory illegally: every later call fails
//   early        every event query reports completion, even if the event is unfinished
//   unloadable N device N, not call N: it has no code of any kernel that is loaded from a library
class Faults {
 public:
  // Replaces the planted fault. Call only while no other thread uses the runtime.
  void plant(const std::string& text) {
    const size_t end = text.find(' ');
    kind_ = text.substr(0, end);
    number_ = end == std::string::npos ? -1 : std::atol(text.c_str() + end);
    num_calls_ = 0;
  }

  // Call for every mark of the log.
  void mark(const char* text) { in_step_ = std::strncmp(text, "begin", 5) == 0; }

  // Returns whether the current call must fail with this kind of fault.
  bool is_due(const char* kind) {
    return in_step_ && kind_ == kind && (number_ < 0 || num_calls_++ == number_);
  }

  // Returns whether kernels cannot be loaded on a device.
  bool is_unloadable(int device) const { return in_step_ && kind_ == "unloadable" && number_ == device; }

 private:
  std::string kind_;
  long number_ = -1;
  std::atomic<bool> in_step_{false};
  std::atomic<long> num_calls_{0};
};
