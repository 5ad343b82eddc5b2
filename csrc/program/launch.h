// Steps of a program that launch a kernel, and steps that check what kernels compute.
#pragma once

#include "program/kernel.h"
#include "program/operator.h"

#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace gpipe_fast {

// A tensor, whose address is passed, or the bytes of a number.
using LaunchArgument = std::variant<at::Tensor*, std::string>;

// Returns a step that launches a kernel. Two null pointers follow the arguments: the scratch memory of Triton's
// kernels. `aligned` is launched if the addresses of the tensors at `aligned_positions` are divisible by 16, otherwise
// `unaligned`, which may be the same kernel. Nothing is launched if a dimension of the grid is 0.
//
// The arguments must be as many and as large as the kernels' parameters, which gpipe_fast/fuse/cubin.py compares
// with their types: a launch reads as many bytes as the kernel declares, whatever it is given.
//
// All tensors must be on the kernels' device when the step is executed. The step allocates nothing, because the
// arguments are bound when it is built.
std::unique_ptr<Operator> make_launch(std::shared_ptr<Kernel> aligned, std::shared_ptr<Kernel> unaligned,
                                      const Grid& grid, const std::vector<LaunchArgument>& arguments,
                                      const std::vector<int64_t>& aligned_positions);

// Returns whether it is done, and need not be called again. The tensors are aliases of the program's: valid until it
// returns. It may overwrite the outputs.
using Check =
    std::function<bool(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs)>;

// Returns a step that calls `check` until it is done, whenever it is executed while the current stream of the outputs'
// device is not being captured. Then the check is destroyed. A check that throws fails the step. There must be an
// output.
std::unique_ptr<Operator> make_check(Check check, std::vector<at::Tensor*> inputs,
                                     std::vector<at::Tensor*> outputs);

}  // namespace gpipe_fast
