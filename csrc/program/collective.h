// Steps of a program that exchange tensors with the other processes of a group.
#pragma once

#include "engine/cancellation_token.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace gpipe_fast {

// Starts the collective of this name in `_c10d_functional`, with the operator's arguments, of which the last names the
// group, and waits for its result: on a GPU, the current stream waits; else the thread does, and checks the token
// meanwhile, if it is not null, so that a cancellation ends the wait.
at::Tensor run_collective(const std::string& name, const std::vector<c10::IValue>& arguments,
                          CancellationToken* token);

}  // namespace gpipe_fast
