// Operators called through the boxed dispatcher.
#include "program/operator.h"

#include "check.h"
#include "program/collective.h"

#include <ATen/core/stack.h>

#include <cstdlib>

namespace gpipe_fast {
namespace {

const std::string kCollectives = "_c10d_functional::";

class BoxedOperator final : public Operator {
 public:
  BoxedOperator(c10::OperatorHandle op, std::vector<Argument> arguments, bool is_out_variant)
      : op_(std::move(op)), arguments_(std::move(arguments)), is_out_variant_(is_out_variant) {
    for (const auto& argument : op_.schema().arguments())
      optional_list_.push_back(is_optional_list(argument.type()));
    const std::string& name = op_.schema().name();
    if (name.rfind(kCollectives, 0) == 0) collective_ = name.substr(kCollectives.size());
  }

  void call(std::vector<at::Tensor>& results, CancellationToken* token) override {
    stack_.clear();
    for (size_t i = 0; i < arguments_.size(); ++i) push(i);
    try {
      if (collective_.empty()) {
        op_.callBoxed(stack_);
      } else {
        stack_ = {run_collective(collective_, stack_, token)};
      }
    } catch (...) {
      stack_.clear();
      throw;
    }
    if (!is_out_variant_) {
      for (auto& value : stack_) append(std::move(value), results);
    }
    stack_.clear();
  }

  std::unique_ptr<Operator> copy(const Moved& moved) const override {
    auto found = std::make_unique<BoxedOperator>(*this);
    found->stack_.clear();
    for (Argument& argument : found->arguments_) {
      if (auto* tensor = std::get_if<at::Tensor*>(&argument)) {
        *tensor = moved(*tensor);
      } else if (auto* tensors = std::get_if<std::vector<at::Tensor*>>(&argument)) {
        for (at::Tensor*& each : *tensors) each = each == nullptr ? nullptr : moved(each);
      }
    }
    return found;
  }

  c10::TypePtr argument_type(size_t position) const override {
    return op_.schema().arguments().at(position).type();
  }

  void set_constant(size_t position, c10::IValue value) override {
    arguments_.at(position) = std::move(value);
  }

 private:
  static bool is_optional_list(const c10::TypePtr& type) {
    auto list = type->cast<c10::ListType>();
    return list && list->getElementType()->kind() == c10::TypeKind::OptionalType;
  }

  void push(size_t i) {
    const auto& argument = arguments_[i];
    if (const auto* constant = std::get_if<c10::IValue>(&argument)) {
      stack_.push_back(*constant);
    } else if (const auto* tensor = std::get_if<at::Tensor*>(&argument)) {
      stack_.emplace_back(**tensor);
    } else if (optional_list_[i]) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto* tensor : std::get<std::vector<at::Tensor*>>(argument)) {
        list.push_back(tensor == nullptr ? std::nullopt : std::optional<at::Tensor>(*tensor));
      }
      stack_.emplace_back(std::move(list));
    } else {
      c10::List<at::Tensor> list;
      for (const auto* tensor : std::get<std::vector<at::Tensor*>>(argument)) list.push_back(*tensor);
      stack_.emplace_back(std::move(list));
    }
  }

  static void append(c10::IValue value, std::vector<at::Tensor>& results) {
    if (value.isTensor()) {
      results.push_back(std::move(value).toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) results.push_back(tensor);
    } else {
      results.emplace_back();  // a number that graphs never read, such as a seed
    }
  }

  c10::OperatorHandle op_;
  std::vector<Argument> arguments_;
  bool is_out_variant_;
  std::vector<bool> optional_list_;
  std::string collective_;  // the name of one; else empty
  torch::jit::Stack stack_;
};

[[noreturn]] void refuse_copy() {
  GPIPE_CHECK(false, "a step that launches or checks a kernel has no copy for other sizes");
  std::abort();
}

}  // namespace

std::unique_ptr<Operator> Operator::copy(const Moved&) const { refuse_copy(); }
c10::TypePtr Operator::argument_type(size_t) const { refuse_copy(); }
void Operator::set_constant(size_t, c10::IValue) { refuse_copy(); }

std::unique_ptr<Operator> make_boxed(const c10::OperatorHandle& op, std::vector<Argument> arguments,
                                     bool is_out_variant) {
  return std::make_unique<BoxedOperator>(op, std::move(arguments), is_out_variant);
}

}  // namespace gpipe_fast
