// Ports: the role that each input and output tensor of a program has in its stage.
#pragma once

#include <cstdint>

namespace gpipe_fast {

// The roles of gpipe_fast.trace.trace.GraphRole, except parameters and their gradients.
enum class Role : uint8_t {
  buffer,          // a module's buffer after the previous micro-batch; as a result, its new value
  key,             // random key of the micro-batch: int64 [mini-batch key, micro-batch, first layer]
  input,           // boundary activation from the previous stage
  output,          // boundary activation for the next stage
  saved,           // saved by the forward for the backward
  held,            // held by the backward for the gradients of parameters
  tangent,         // boundary gradient from the next stage
  input_gradient,  // boundary gradient for the previous stage
};

struct Port {
  Role role;
  int64_t index;
  // A new value of a buffer by an operator that does not increment the version of what it writes, as batch norm.
  bool keeps_version = false;
};

}  // namespace gpipe_fast
