// What a tensor that enters or leaves a program is to its stage.
#pragma once

#include <cstdint>

namespace gpipe_fast {

// The names are those of gpipe_fast.trace.trace.Role.
enum class Role : uint8_t {
  buffer,          // a module's buffer, as the micro-batch before left it; as a result, its new value
  key,             // of the micro-batch's random draws: int64 [mini-batch key, micro-batch, first layer]
  input,           // boundary activation from the stage before
  output,          // boundary activation for the stage after
  saved,           // kept between forward and backward
  tangent,         // boundary gradient from the stage after
  input_gradient,  // boundary gradient for the stage before
};

struct Port {
  Role role;
  int64_t index;
};

}  // namespace gpipe_fast
