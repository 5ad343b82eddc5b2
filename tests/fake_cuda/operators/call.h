// A call of an operator on a fake device, computed by the CPU's operator.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace fake_operators {

using Stack = torch::jit::Stack;

// Pops the arguments from the stack, and pushes the results.
void call(const c10::OperatorHandle& op, Stack* stack);

}  // namespace fake_operators
