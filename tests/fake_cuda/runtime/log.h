// The log of the fake runtime, and the faults that tests plant in it.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

namespace fake_cuda {

// Guards the log and every table of the runtime. Lines of the log are in the order of the calls.
extern std::mutex mutex;

// A line: thread, then words between tabs.
void write(const char* format, ...);

std::string text(const char* format, ...);

// Whether a call is to go wrong now, which the log then says.
bool planted(const char* kind);

}  // namespace fake_cuda
