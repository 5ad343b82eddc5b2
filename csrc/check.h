// Check macros: every error carries what was received. Free of torch, so that the engine can use them.
//
//   GPIPE_CHECK(cond, parts...)      a state that must hold; throws std::runtime_error
//   GPIPE_CHECK_ARG(cond, parts...)  what a caller passed; throws std::invalid_argument (Python: ValueError)
//   GPIPE_CHECK_CUDA(call)           a CUDA runtime call; for files that include cuda_runtime.h
//
// The parts are streamed into the message, and evaluated only when the check fails.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace gpipe_fast::detail {

template <typename... Parts>
std::string concatenate(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  return message.str();
}

}  // namespace gpipe_fast::detail

#define GPIPE_CHECK_AS(Error, cond, ...)                                                           \
  do {                                                                                             \
    if (__builtin_expect(!(cond), 0)) throw Error(::gpipe_fast::detail::concatenate(__VA_ARGS__)); \
  } while (false)

#define GPIPE_CHECK(cond, ...) GPIPE_CHECK_AS(::std::runtime_error, cond, __VA_ARGS__)
#define GPIPE_CHECK_ARG(cond, ...) GPIPE_CHECK_AS(::std::invalid_argument, cond, __VA_ARGS__)

#define GPIPE_CHECK_CUDA(call)                                                                  \
  do {                                                                                          \
    const cudaError_t gpipe_status = (call);                                                    \
    GPIPE_CHECK(gpipe_status == cudaSuccess, #call, ": ", cudaGetErrorName(gpipe_status), ": ", \
                cudaGetErrorString(gpipe_status));                                              \
  } while (false)
