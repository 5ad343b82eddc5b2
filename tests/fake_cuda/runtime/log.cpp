#include "log.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake_cuda {
namespace {

// One fault is planted at a time; `fault_number` is the index of the affected call, counted from 0 between the marks
// "begin" and "end", or a device.
std::string fault;
long fault_number = -1;
std::atomic<bool> in_step{false};
std::atomic<long> num_calls{0};

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

bool is_unloadable(int device) { return in_step && fault == "unloadable" && fault_number == device; }

bool is_illegal() { return in_step && fault == "sticky" && num_calls++ == fault_number; }

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
  in_step = std::strncmp(text, "begin", 5) == 0;
  write("mark\t%s", text);
}

void fake_cuda_plant(const char* kind, int number) {
  fault = kind;
  fault_number = number;
  num_calls = 0;
}

}  // extern "C"

}  // namespace fake_cuda
