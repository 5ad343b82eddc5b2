// Steps of a program that exchange tensors with the other processes of a group.
#pragma once

#include "program/operator.h"

#include <memory>
#include <vector>

namespace gpipe_fast {

// Returns a step that starts an operator of `_c10d_functional` and waits for its result: on a GPU, the current stream
// waits; else the thread does, and checks the token meanwhile, so that a cancellation ends the wait. The first argument
// is the tensor, the last one the name of the group, which is looked up at each call.
std::unique_ptr<Operator> make_collective(const c10::OperatorHandle& op, std::vector<Argument> arguments);

}  // namespace gpipe_fast
