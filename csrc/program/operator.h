// One operator call of a program, its arguments bound when the program is built.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace gpipe_fast {

// A constant, a tensor read when the call is made, or a list of such (absent ones are null).
using Argument = std::variant<c10::IValue, at::Tensor*, std::vector<at::Tensor*>>;

class Operator {
 public:
  virtual ~Operator() = default;
  // Appends the results, lists flattened; an out variant appends nothing.
  virtual void call(std::vector<at::Tensor>& results) = 0;
};

// Calls through the boxed dispatcher: any operator.
std::unique_ptr<Operator> make_boxed(const c10::OperatorHandle& op, std::vector<Argument> arguments,
                                     bool is_out_variant);

// Calls the operator's function directly; null when the operator is not in the table.
std::unique_ptr<Operator> make_direct(const c10::OperatorHandle& op, const std::vector<Argument>& arguments);

}  // namespace gpipe_fast
