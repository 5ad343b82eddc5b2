#include "pipeline/thread_state.h"

#include <ATen/Parallel.h>
#include <omp.h>

// PyTorch's own library contains MKL, if PyTorch was built with it.
extern "C" int MKL_Set_Num_Threads_Local(int) __attribute__((weak));

namespace gpipe_fast {
namespace {

void set_num_threads(int num_threads) {
  // at::set_num_threads would set MKL's thread count for all threads. PyTorch initializes a thread's count when the
  // thread first queries it, and does not change the count afterwards.
  (void)at::get_num_threads();
  omp_set_num_threads(num_threads);
  if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(num_threads);
}

class RecordFunctionGuard {
 public:
  explicit RecordFunctionGuard(const at::RecordFunctionTLS& observers)
      : before_(at::get_record_function_tls_()) {
    at::set_record_function_tls_(observers);
  }
  ~RecordFunctionGuard() { at::set_record_function_tls_(before_); }
  RecordFunctionGuard(const RecordFunctionGuard&) = delete;
  RecordFunctionGuard& operator=(const RecordFunctionGuard&) = delete;

 private:
  at::RecordFunctionTLS before_;
};

}  // namespace

ThreadState::ThreadState(int num_threads)
    : num_threads_(num_threads),
      record_functions_(at::get_record_function_tls_()),
      debug_info_(c10::ThreadLocalDebugInfo::current()) {
  std::fegetenv(&floating_point_);
}

void ThreadState::run(const std::function<void()>& body) const {
  set_num_threads(num_threads_);
  std::fesetenv(&floating_point_);
  const RecordFunctionGuard observers(record_functions_);
  const c10::DebugInfoGuard debug_info(debug_info_);
  body();
}

}  // namespace gpipe_fast
