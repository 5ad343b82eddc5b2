// One call of an operator on a fake device, computed by the CPU's.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace fake_operators {

using Stack = torch::jit::Stack;

// Takes the arguments from the stack, and puts what it returns on it.
void call(const c10::OperatorHandle& op, Stack* stack);

}  // namespace fake_operators
