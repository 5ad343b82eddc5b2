// The log of the fake runtime, and fault injection.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

namespace fake_cuda {

// Guards the log and every table of the runtime. Lines of the log are in the order of the calls.
extern std::mutex mutex;

// Writes a line: the number of the thread, then tab-separated words.
void write(const char* format, ...);

// Returns whether there is a log.
bool is_logging();

std::string text(const char* format, ...);

// Returns whether the current operation accesses memory illegally: the planted fault is "sticky", with its number.
bool is_illegal();
// Returns whether a device has no code of any kernel of a library: the fault is "unloadable", with the device.
bool is_unloadable(int device);

}  // namespace fake_cuda
