#include "call.h"

#include "work.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fake_operators {
namespace {

// Returns a CPU tensor of zeros with the same sizes and strides. Zeros are valid as indices, too.
at::Tensor zeros_for(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options).zero_();
}

// Copies an argument on the CPU, which the caller may change or free before the deferred call uses it.
at::Tensor copy_argument(const at::Tensor& tensor) {
  at::Tensor copy = tensor.detach().clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

// Returns whether a non-tensor result, or the shape of a result, depends on the values of the arguments.
bool needs_values(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) {
    const bool indexing = op.operator_name().name.rfind("aten::index", 0) == 0;
    if (!indexing) {
      return true;
    }
  }
  for (const auto& result : op.schema().returns()) {
    if (result.type()->str().find("Tensor") == std::string::npos) {
      return true;
    }
  }
  for (const c10::IValue& argument : arguments) {  // boolean masks as indices
    if (argument.isTensorList() || argument.isOptionalTensorList()) {
      for (const c10::IValue& each : argument.toListRef()) {
        const bool mask =
            each.isTensor() && each.toTensor().defined() &&
            (each.toTensor().scalar_type() == at::kBool || each.toTensor().scalar_type() == at::kByte);
        if (mask && op.operator_name().name.find("index") != std::string::npos) {
          return true;
        }
      }
    }
  }
  return false;
}

bool has_16_bits(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;
}

void redispatch(const c10::OperatorHandle& op, Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// Calls an operator on CPU tensors. A layer norm of 16-bit numbers has fp32 statistics, as on a GPU: the CPU's
// operator computes them in the dtype of the weight.
void call_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const std::string& name = op.operator_name().name;
  const bool backward = name == "aten::native_layer_norm_backward";
  if ((!backward && name != "aten::native_layer_norm") || !stack->at(0).toTensor().defined() ||
      !has_16_bits(stack->at(0).toTensor())) {
    return redispatch(op, stack);
  }
  const size_t shape_index = backward ? 2 : 1;
  const size_t weight_index = backward ? 5 : 2;
  const auto shape = stack->at(shape_index).toIntVector();
  const auto wide = at::TensorOptions().dtype(at::kFloat);
  for (const size_t i : {weight_index, weight_index + 1}) {
    const bool given = stack->at(i).isTensor() && stack->at(i).toTensor().defined();
    const at::Tensor absent = i == weight_index ? at::ones(shape, wide) : at::zeros(shape, wide);
    stack->at(i) = given ? stack->at(i).toTensor().to(at::kFloat) : absent;
  }
  const auto dtype = stack->at(0).toTensor().scalar_type();
  redispatch(op, stack);
  for (size_t i = 1; backward && i < 3; ++i) {
    const bool computed = stack->at(i).isTensor() && stack->at(i).toTensor().defined();
    stack->at(i) = computed ? stack->at(i).toTensor().to(dtype) : at::Tensor();
  }
}

// A call, with the CPU tensors that alias or replace its arguments and results.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op) {}

  void run(Stack* stack) {
    const size_t begin = stack->size() - op_.schema().arguments().size();
    const Stack given(stack->begin() + static_cast<int64_t>(begin), stack->end());
    stack->resize(begin);
    Stack results = fake_cuda_deferring() != 0 ? defer(given) : compute(given);
    for (c10::IValue& result : results) {
      stack->push_back(std::move(result));
    }
  }

 private:
  Stack compute(const Stack& given) {
    const Stack arguments = to_cpu(given);
    synchronize_if_named();
    log_name(*device_, op_.operator_name().name);
    if (op_.operator_name().name.find("mm") != std::string::npos) {
      use_workspace(*device_);
    }
    log_casts(given);
    const bool captured = is_capturing(*device_);
    Stack results = call_cpu(arguments);
    for (auto& [original, own] : resized_) {
      original.resize_(own.sizes());
      cpu_alias(original).copy_(own);
    }
    for (const at::Tensor& written : written_) {
      log_access(written, true);
    }
    if (captured) {
      enqueue_call(arguments, results);
    }
    return to_device(results);
  }

  // Allocates the results now, and enqueues the computation.
  Stack defer(const Stack& given) {
    shapes_only_ = true;
    Stack zeros = to_cpu(given);
    synchronize_if_named();
    const c10::cuda::CUDAGuard guard(*device_);
    const auto stream = c10::cuda::getCurrentCUDAStream();
    const bool captured = is_capturing(*device_);
    const bool draws = op_.hasTag(at::Tag::nondeterministic_seeded) && !captured;
    bool known = !draws && !needs_values(op_, given);
    Stack results;
    if (known) {
      try {
        results = call_cpu(std::move(zeros));
      } catch (const c10::Error&) {
        known = false;  // the operator depends on the values, or it fails for all values
      }
    }
    if (!known) {
      draws ? fake_cuda_complete(stream.stream()) : stream.synchronize();
      reset();
      return compute(given);
    }
    for (auto& [original, own] : resized_) {
      original.resize_(own.sizes());
    }
    results = to_device(results);
    std::vector<at::Tensor> allocated = std::move(allocated_);
    reset();
    enqueue_call(to_cpu(given), results);
    for (const at::Tensor& each : written_) {
      log_access(each, true);
    }
    for (const at::Tensor& each : allocated) {
      log_access(each, true);
    }
    return results;
  }

  void reset() {
    shapes_only_ = false;
    aliases_.clear();
    resized_.clear();
    written_.clear();
    allocated_.clear();
  }

  void synchronize_if_named() const {
    TORCH_CHECK(device_.has_value(), "no tensor argument is on a fake device: ", op_.operator_name());
    static const char* const synchronizes = std::getenv("FAKE_CUDA_SYNCHRONIZES");
    if (synchronizes != nullptr && op_.operator_name().name == synchronizes) {
      const c10::cuda::CUDAGuard guard(*device_);
      c10::cuda::getCurrentCUDAStream().synchronize();
    }
  }

  // Marks the casts of an operator that copies several tensors.
  void log_casts(const Stack& given) const {
    if (op_.operator_name().name != "aten::_foreach_copy_") {
      return;
    }
    const auto targets = given[0].toTensorVector(), sources = given[1].toTensorVector();
    for (size_t i = 0; i < targets.size(); ++i) {
      if (targets[i].dtype() != sources[i].dtype()) {
        log_mark(*device_, c10::str("cast\t", sources[i].scalar_type(), "\t", targets[i].scalar_type(), "\t",
                                    sources[i].const_data_ptr()));
      }
    }
  }

  Stack call_cpu(Stack stack) const {
    const at::AutoDispatchBelowADInplaceOrView guard;
    call_on_cpu(op_, &stack);
    return stack;
  }

  static std::vector<at::Tensor> tensors_of(const Stack& stack) {
    std::vector<at::Tensor> found;
    for (const c10::IValue& value : stack) {
      if (value.isTensor()) {
        found.push_back(value.toTensor());
      } else if (value.isTensorList()) {
        for (const at::Tensor& each : value.toTensorVector()) {
          found.push_back(each);
        }
      }
    }
    return found;
  }

  // Enqueues the call. It reads its arguments when it runs, and writes the memory of the results.
  void enqueue_call(const Stack& arguments, const Stack& results) {
    std::vector<at::Tensor> targets;
    for (const at::Tensor& result : tensors_of(results)) {
      const bool allocated = result.defined() && !given(result);
      targets.push_back(allocated ? cpu_alias(result.is_cuda() ? result : to_device(result)) : at::Tensor());
    }
    std::vector<std::pair<at::Tensor, at::Tensor>> resized;
    for (const auto& [original, own] : resized_) {
      resized.emplace_back(cpu_alias(original), own);
    }
    enqueue(*device_, [op = op_, arguments, targets, resized] {
      Stack stack = arguments;
      call_on_cpu(op, &stack);
      const std::vector<at::Tensor> found = tensors_of(stack);
      for (size_t i = 0; i < targets.size(); ++i) {
        if (targets[i].defined()) {
          targets[i].copy_(found.at(i));
        }
      }
      for (const auto& [target, own] : resized) {
        target.copy_(own);
      }
    });
  }

  bool given(const at::Tensor& own) const {
    return std::any_of(aliases_.begin(), aliases_.end(),
                       [&](const auto& pair) { return pair.first.is_same(own) || pair.second.is_same(own); });
  }

  Stack to_cpu(const Stack& given) {
    Stack found;
    for (size_t i = 0; i < given.size(); ++i) {
      const auto& argument = op_.schema().arguments()[i];
      const auto* info = argument.alias_info();
      found.push_back(to_cpu(given[i], info != nullptr && info->isWrite(), argument.is_out()));
    }
    return found;
  }

  c10::IValue to_cpu(const c10::IValue& value, bool writes, bool out) {
    if (value.isTensor()) {
      return value.toTensor().defined() ? to_cpu(value.toTensor(), writes, out) : value;
    }
    if (value.isTensorList() || value.isOptionalTensorList()) {
      const bool optional = value.isOptionalTensorList();
      c10::List<std::optional<at::Tensor>> maybe;
      c10::List<at::Tensor> all;
      for (const c10::IValue& each : value.toListRef()) {
        const bool there = each.isTensor() && each.toTensor().defined();
        const at::Tensor own = there ? to_cpu(each.toTensor(), writes, out) : at::Tensor();
        optional ? maybe.push_back(there ? std::optional(own) : std::nullopt) : all.push_back(own);
      }
      return optional ? c10::IValue(maybe) : c10::IValue(all);
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      return at::Device(at::kCPU);
    }
    return value;
  }

  at::Tensor to_cpu(const at::Tensor& tensor, bool writes, bool out) {
    if (!tensor.is_cuda()) {
      return fake_cuda_deferring() != 0 && !writes ? copy_argument(tensor) : tensor;
    }
    if (!device_.has_value()) {
      device_ = tensor.device();
    }
    if (!out && !shapes_only_) {
      log_access(tensor, false);
    }
    if (writes) {
      written_.push_back(tensor);
      if (!out && !shapes_only_ && tensor.numel() > 0) {
        const c10::cuda::CUDAGuard guard(tensor.device());
        fake_cuda_save(c10::cuda::getCurrentCUDAStream().stream(), tensor.const_data_ptr(),
                       extent_bytes(tensor));
      }
    }
    if (out && tensor.numel() == 0) {
      // The operator may resize an empty output, which is impossible for an alias of other memory.
      at::Tensor own = at::empty({0}, tensor.options().device(at::kCPU));
      resized_.emplace_back(tensor, own);
      aliases_.emplace_back(own, tensor);
      return own;
    }
    aliases_.emplace_back(shapes_only_ ? zeros_for(tensor) : cpu_alias(tensor), tensor);
    return aliases_.back().first;
  }

  Stack to_device(const Stack& results) {
    Stack found;
    for (const c10::IValue& result : results) {
      found.push_back(to_device(result));
    }
    return found;
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) {
      return to_device(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& each : value.toTensorVector()) {
        all.push_back(to_device(each));
      }
      return all;
    }
    return value;
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    for (const auto& [own, original] : aliases_) {
      if (own.is_same(tensor)) {
        return original;
      }
    }
    const at::Tensor allocated =
        at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(*device_));
    if (shapes_only_) {
      allocated_.push_back(allocated);
    } else {
      cpu_alias(allocated).copy_(tensor);
      log_access(allocated, true);
    }
    aliases_.emplace_back(tensor, allocated);
    return allocated;
  }

  const c10::OperatorHandle& op_;
  std::optional<at::Device> device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;  // CPU tensor, tensor that it replaces
  std::vector<std::pair<at::Tensor, at::Tensor>> resized_;  // output, CPU tensor that is written instead
  std::vector<at::Tensor> written_;
  std::vector<at::Tensor> allocated_;
  bool shapes_only_ = false;  // runs with zeros to find the shapes of the results
};

}  // namespace

void call(const c10::OperatorHandle& op, Stack* stack) { Call(op).run(stack); }

}  // namespace fake_operators
