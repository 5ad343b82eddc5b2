// Operators called directly through their C++ functions: without boxing, with constants converted once.
#include "program/operator.h"

#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clamp_min_ops.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/sigmoid_backward_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/threshold_backward_ops.h>

#include <array>
#include <map>
#include <tuple>
#include <type_traits>
#include <utility>

namespace gpipe_fast {
namespace {

// Holds one argument of type T: a constant is converted once, a tensor is read through a pointer at each call.
template <class T>
struct BoundArgument {
  explicit BoundArgument(const Argument& argument) : value(std::get<c10::IValue>(argument).to<T>()) {}
  const T& get() { return value; }
  T value;
};

struct BoundTensor {
  explicit BoundTensor(const Argument& argument) {
    if (const auto* constant = std::get_if<c10::IValue>(&argument)) {
      constant_tensor = constant->toTensor();
    } else {
      tensor = std::get<at::Tensor*>(argument);
    }
  }
  at::Tensor& get() { return tensor == nullptr ? constant_tensor : *tensor; }
  at::Tensor constant_tensor;
  at::Tensor* tensor = nullptr;
};

template <>
struct BoundArgument<const at::Tensor&> : BoundTensor {
  using BoundTensor::BoundTensor;
};
template <>
struct BoundArgument<at::Tensor&> : BoundTensor {
  using BoundTensor::BoundTensor;
};

template <>
struct BoundArgument<const std::optional<at::Tensor>&> {
  explicit BoundArgument(const Argument& argument) {
    if (const auto* constant = std::get_if<c10::IValue>(&argument)) {
      constant_tensor = constant->toOptional<at::Tensor>();
    } else {
      tensor = std::get<at::Tensor*>(argument);
    }
  }
  std::optional<at::Tensor> get() {
    return tensor == nullptr ? constant_tensor : std::optional<at::Tensor>(*tensor);
  }
  std::optional<at::Tensor> constant_tensor;
  at::Tensor* tensor = nullptr;
};

template <>
struct BoundArgument<const at::Scalar&> {
  explicit BoundArgument(const Argument& argument) : value(std::get<c10::IValue>(argument).toScalar()) {}
  const at::Scalar& get() { return value; }
  at::Scalar value;
};

template <>
struct BoundArgument<std::string_view> {
  explicit BoundArgument(const Argument& argument) : value(std::get<c10::IValue>(argument).toStringRef()) {}
  std::string_view get() { return value; }
  std::string value;
};

template <>
struct BoundArgument<at::IntArrayRef> {
  explicit BoundArgument(const Argument& argument) : value(std::get<c10::IValue>(argument).toIntVector()) {}
  at::IntArrayRef get() { return value; }
  std::vector<int64_t> value;
};

template <>
struct BoundArgument<at::OptionalIntArrayRef> {
  explicit BoundArgument(const Argument& argument) {
    const auto& constant = std::get<c10::IValue>(argument);
    if (!constant.isNone()) value = constant.toIntVector();
  }
  at::OptionalIntArrayRef get() {
    return value ? at::OptionalIntArrayRef(*value) : at::OptionalIntArrayRef();
  }
  std::optional<std::vector<int64_t>> value;
};

template <>
struct BoundArgument<c10::SymIntArrayRef> {
  explicit BoundArgument(const Argument& argument) {
    for (int64_t size : std::get<c10::IValue>(argument).toIntVector()) value.emplace_back(size);
  }
  c10::SymIntArrayRef get() { return value; }
  std::vector<c10::SymInt> value;
};

template <>
struct BoundArgument<at::OptionalSymIntArrayRef> {
  explicit BoundArgument(const Argument& argument) {
    const auto& constant = std::get<c10::IValue>(argument);
    if (constant.isNone()) return;
    value.emplace();
    for (int64_t size : constant.toIntVector()) value->emplace_back(size);
  }
  at::OptionalSymIntArrayRef get() {
    return value ? at::OptionalSymIntArrayRef(*value) : at::OptionalSymIntArrayRef();
  }
  std::optional<std::vector<c10::SymInt>> value;
};

template <>
struct BoundArgument<c10::SymInt> {
  explicit BoundArgument(const Argument& argument) : value(std::get<c10::IValue>(argument).toInt()) {}
  c10::SymInt get() { return value; }
  int64_t value;
};

template <size_t N>
struct BoundArgument<std::array<bool, N>> {
  explicit BoundArgument(const Argument& argument) {
    auto list = std::get<c10::IValue>(argument).toBoolList();
    for (size_t i = 0; i < N; ++i) value[i] = list.get(i);
  }
  const std::array<bool, N>& get() { return value; }
  std::array<bool, N> value;
};

template <>
struct BoundArgument<const at::ITensorListRef&> {
  explicit BoundArgument(const Argument& argument) : tensors(std::get<std::vector<at::Tensor*>>(argument)) {}
  // Refers to the tensors until the call has ended, and no longer.
  struct List {
    operator at::ITensorListRef() const { return tensors; }
    std::vector<at::Tensor> tensors;
  };
  List get() {
    List list;
    for (const auto* tensor : tensors) list.tensors.push_back(*tensor);
    return list;
  }
  std::vector<at::Tensor*> tensors;
};

template <class Op, class Schema = typename Op::schema>
class DirectOperator;

template <class Op, class Return, class... Args>
class DirectOperator<Op, Return(Args...)> final : public Operator {
 public:
  explicit DirectOperator(const std::vector<Argument>& arguments)
      : DirectOperator(arguments, std::index_sequence_for<Args...>{}) {}

  void call(std::vector<at::Tensor>& results) override {
    std::apply(
        [&](auto&... bound) {
          if constexpr (std::is_reference_v<Return>) {
            Op::call(bound.get()...);
          } else {
            append(Op::call(bound.get()...), results);
          }
        },
        arguments_);
  }

 private:
  template <size_t... I>
  DirectOperator(const std::vector<Argument>& arguments, std::index_sequence<I...>)
      : arguments_(BoundArgument<Args>(arguments.at(I))...) {}

  static void append(at::Tensor result, std::vector<at::Tensor>& results) {
    results.push_back(std::move(result));
  }
  template <class... T>
  static void append(std::tuple<T...> result, std::vector<at::Tensor>& results) {
    std::apply([&](auto&... each) { (results.push_back(std::move(each)), ...); }, result);
  }

  std::tuple<BoundArgument<Args>...> arguments_;
};

using Factory = std::unique_ptr<Operator> (*)(const std::vector<Argument>&);
using Table = std::map<std::pair<std::string, std::string>, Factory>;

template <class... Ops>
Table table() {
  return {{{Ops::name, Ops::overload_name},
           [](const std::vector<Argument>& arguments) -> std::unique_ptr<Operator> {
             return std::make_unique<DirectOperator<Ops>>(arguments);
           }}...};
}

}  // namespace

std::unique_ptr<Operator> make_direct(const c10::OperatorHandle& op, const std::vector<Argument>& arguments) {
  namespace o = at::_ops;
  static const Table factories =
      table<o::mm_out, o::addmm_out, o::bmm_out, o::baddbmm_out, o::add_out, o::sub_out, o::mul_out,
            o::div_out, o::copy_, o::sum_IntList_out, o::cat_out, o::clamp_min_out,
            o::threshold_backward_grad_input, o::gelu_out, o::gelu_backward_grad_input, o::silu_out,
            o::silu_backward_grad_input, o::tanh_out, o::tanh_backward_grad_input, o::sigmoid_out,
            o::sigmoid_backward_grad_input, o::_softmax_out, o::_softmax_backward_data_out,
            o::_log_softmax_out, o::_log_softmax_backward_data_out, o::native_layer_norm,
            o::native_layer_norm_backward, o::embedding, o::convolution, o::convolution_backward,
            o::_scaled_dot_product_flash_attention_for_cpu,
            o::_scaled_dot_product_flash_attention_for_cpu_backward>();
  const auto& name = op.operator_name();
  auto found = factories.find({name.name, name.overload_name});
  return found == factories.end() ? nullptr : found->second(arguments);
}

}  // namespace gpipe_fast
