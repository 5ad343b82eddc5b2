// What a worker takes over from the thread that calls: how it computes, and who watches it.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cfenv>
#include <functional>
#include <memory>

namespace gpipe_fast {

// Taken by the calling thread; used by any number of workers. Not taken over are grad and inference mode, autocast and
// dispatch modes: programs run below all of them.
class Surroundings {
 public:
  // `num_threads`: intra-op threads of each worker.
  explicit Surroundings(int num_threads);

  // Runs `body` in them, in this thread. Its OpenMP and MKL thread counts stay; those of other threads do not change.
  void run(const std::function<void()>& body) const;

 private:
  int num_threads_;
  std::fenv_t floating_point_;  // rounding, and whether denormals are flushed to zero
  at::RecordFunctionTLS observers_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> debug_info_;
};

}  // namespace gpipe_fast
