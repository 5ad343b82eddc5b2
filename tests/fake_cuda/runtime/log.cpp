#include "log.h"

#include "faults.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace fake_cuda {
namespace {

Faults faults;

FILE* log_file() {
  static FILE* const file = [] {
    const char* path = std::getenv("FAKE_CUDA_LOG");
    return path != nullptr ? std::fopen(path, "w") : nullptr;
  }();
  return file;
}

int64_t thread_number() {
  static std::atomic<int64_t> next{0};
  thread_local const int64_t number = next++;
  return number;
}

}  // namespace

std::mutex mutex;

void write(const char* format, ...) {
  FILE* const file = log_file();
  if (file == nullptr) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  std::fprintf(file, "%ld\t", static_cast<long>(thread_number()));
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(file, format, arguments);
  va_end(arguments);
  std::fputc('\n', file);
  std::fflush(file);
}

bool is_logging() { return log_file() != nullptr; }

bool is_unloadable(int device) { return faults.is_unloadable(device); }

bool planted(const char* kind) {
  if (!faults.is_due(kind)) {
    return false;
  }
  write("mark\tplanted %s", kind);
  return true;
}

std::string text(const char* format, ...) {
  char found[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(found, sizeof(found), format, arguments);
  va_end(arguments);
  return found;
}

extern "C" {

void fake_cuda_mark(const char* text) {
  faults.mark(text);
  write("mark\t%s", text);
}

void fake_cuda_plant(const char* fault) { faults.plant(fault); }

}  // extern "C"

}  // namespace fake_cuda
