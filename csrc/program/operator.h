// One operator call of a program, with arguments bound when the program is built.
#pragma once

#include "engine/cancellation_token.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace gpipe_fast {

// A constant, a tensor that is read at the call, or a list of such tensors (null pointers are absent tensors).
using Argument = std::variant<c10::IValue, at::Tensor*, std::vector<at::Tensor*>>;

// Returns the tensor of another program in the place of one.
using Moved = std::function<at::Tensor*(at::Tensor*)>;

class Operator {
 public:
  virtual ~Operator() = default;
  // Calls the operator and appends its results, with lists flattened; an out variant appends nothing. One that waits for
  // other processes checks the token, if it is not null, meanwhile.
  virtual void call(std::vector<at::Tensor>& results, CancellationToken* token) = 0;
  // Returns a copy for another program. By default an error: a kernel is launched for fixed sizes.
  virtual std::unique_ptr<Operator> copy(const Moved& moved) const;
  // Returns the type of an argument, and replaces one by a constant; defined where copy() is.
  virtual c10::TypePtr argument_type(size_t position) const;
  virtual void set_constant(size_t position, c10::IValue value);
};

// Returns a call through the boxed dispatcher, which supports every operator; or, for a functional collective, one that
// also waits for the result.
std::unique_ptr<Operator> make_boxed(const c10::OperatorHandle& op, std::vector<Argument> arguments,
                                     bool is_out_variant);

}  // namespace gpipe_fast
