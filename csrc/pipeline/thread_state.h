// The thread state: the caller's thread-local settings that a worker takes over (thread count, rounding, profiler).
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cfenv>
#include <functional>
#include <memory>

namespace gpipe_fast {

// The calling thread captures it; any number of workers apply it. It excludes grad mode, inference mode, autocast and
// dispatch modes, because programs run below all of them.
class ThreadState {
 public:
  // `num_threads`: intra-op threads of each worker.
  explicit ThreadState(int num_threads);

  // Runs `body` in this thread with these settings. This thread keeps the OpenMP and MKL thread counts afterwards;
  // those of other threads do not change.
  void run(const std::function<void()>& body) const;

 private:
  int num_threads_;
  std::fenv_t floating_point_;  // rounding mode, and whether denormals are flushed to zero
  at::RecordFunctionTLS record_functions_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> debug_info_;
};

}  // namespace gpipe_fast
