// Operators on the devices of runtime/: computed at once by the CPU's, in the same memory; what they read and
// write, and on which stream, is logged.
//
// Loaded after torch. In place of every kernel that is registered for CUDA there then is one that takes tensors on a
// fake device for tensors on the CPU. Views stay as they are, and copies of whole tensors go through the runtime. The
// operator that FAKE_CUDA_SYNCHRONIZES names waits for its stream, which cannot be captured.

#include <ATen/ATen.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Copy.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

extern "C" void fake_cuda_access(cudaStream_t stream, const void* pointer, size_t bytes, int writes);
extern "C" void fake_cuda_keep(cudaStream_t stream, const void* pointer, size_t bytes);
extern "C" int fake_cuda_capturing(cudaStream_t stream);
extern "C" void fake_cuda_node(cudaStream_t stream, void (*run)(void*), void* data);

namespace {

using Stack = torch::jit::Stack;

// The bytes from a tensor's first element to its last.
size_t extent(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return static_cast<size_t>(last + 1) * tensor.itemsize();
}

void log_access(const at::Tensor& tensor, bool writes) {
  if (tensor.is_cuda() && tensor.numel() > 0) {
    const c10::cuda::CUDAGuard guard(tensor.device());  // by which the default stream is known
    const auto stream = c10::cuda::getCurrentCUDAStream();
    fake_cuda_access(stream.stream(), tensor.const_data_ptr(), extent(tensor), writes ? 1 : 0);
  }
}

// Whether a graph captures what is put on a device now; and what it does again at every launch. It lives on.
bool captures(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  return fake_cuda_capturing(c10::cuda::getCurrentCUDAStream().stream()) != 0;
}
void again(at::Device device, std::function<void()> run) {
  const c10::cuda::CUDAGuard guard(device);
  fake_cuda_node(
      c10::cuda::getCurrentCUDAStream().stream(),
      [](void* data) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        (*static_cast<std::function<void()>*>(data))();
      },
      new std::function<void()>(std::move(run)));
}

// The same memory as a tensor on the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

// One call: which tensors of the CPU stand for which others.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op) {}

  void run(Stack* stack) {
    const auto& schema = op_.schema();
    const size_t begin = stack->size() - schema.arguments().size();
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* info = schema.arguments()[i].alias_info();
      (*stack)[begin + i] =
          to_cpu((*stack)[begin + i], info != nullptr && info->isWrite(), schema.arguments()[i].is_out());
    }
    TORCH_CHECK(device_.has_value(), "no tensor on a fake device: ", op_.operator_name());
    static const char* const synchronizes = std::getenv("FAKE_CUDA_SYNCHRONIZES");
    if (synchronizes != nullptr && op_.operator_name().name == synchronizes) {
      const c10::cuda::CUDAGuard guard(*device_);
      c10::cuda::getCurrentCUDAStream().synchronize();
    }
    const bool captured = captures(*device_);
    const Stack arguments(stack->begin() + static_cast<int64_t>(begin), stack->end());
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    for (auto& [original, own] : resized_) {
      original.resize_(own.sizes());
      on_host(original).copy_(own);
    }
    for (const at::Tensor& written : written_) {
      log_access(written, true);
    }
    const size_t results = stack->size() - schema.returns().size();
    if (captured) {
      TORCH_CHECK(resized_.empty(),
                  "an output that is resized cannot be captured here: ", op_.operator_name());
      capture(arguments, Stack(stack->begin() + static_cast<int64_t>(results), stack->end()));
    }
    for (size_t i = results; i < stack->size(); ++i) {
      (*stack)[i] = to_device((*stack)[i]);
    }
  }

 private:
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

  // Computes the same with what then is in the same memory, into the same memory.
  void capture(const Stack& arguments, const Stack& results) {
    std::vector<at::Tensor> targets;
    for (const at::Tensor& result : tensors_of(results)) {
      const bool made = result.defined() && !given(result);
      targets.push_back(made ? on_host(to_device(result)) : at::Tensor());
    }
    again(*device_, [op = op_, arguments, targets] {
      Stack stack = arguments;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      const std::vector<at::Tensor> found = tensors_of(stack);
      for (size_t i = 0; i < targets.size(); ++i) {
        if (targets[i].defined()) {
          targets[i].copy_(found.at(i));
        }
      }
    });
  }

  bool given(const at::Tensor& own) const {
    return std::any_of(known_.begin(), known_.end(),
                       [&](const auto& pair) { return pair.first.is_same(own); });
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
      return tensor;
    }
    if (!device_.has_value()) {
      device_ = tensor.device();
    }
    if (!out) {
      log_access(tensor, false);
    }
    if (writes) {
      written_.push_back(tensor);
      if (!out && tensor.numel() > 0) {
        const c10::cuda::CUDAGuard guard(tensor.device());
        fake_cuda_keep(c10::cuda::getCurrentCUDAStream().stream(), tensor.const_data_ptr(), extent(tensor));
      }
    }
    if (out && tensor.numel() == 0) {
      // It may be resized, which memory of somebody else's cannot be.
      at::Tensor own = at::empty({0}, tensor.options().device(at::kCPU));
      resized_.emplace_back(tensor, own);
      known_.emplace_back(own, tensor);
      return own;
    }
    known_.emplace_back(on_host(tensor), tensor);
    return known_.back().first;
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
    for (const auto& [own, original] : known_) {
      if (own.is_same(tensor)) {
        return original;
      }
    }
    const at::Tensor made =
        at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(*device_));
    on_host(made).copy_(tensor);
    log_access(made, true);
    known_.emplace_back(tensor, made);
    return made;
  }

  const c10::OperatorHandle& op_;
  std::optional<at::Device> device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> known_;    // on the CPU, and what it stands for
  std::vector<std::pair<at::Tensor, at::Tensor>> resized_;  // what is given, and what is written in its place
  std::vector<at::Tensor> written_;
};

void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { Call(op).run(stack); }

// As torch does it where no kernel is needed: through the runtime. Else on the device that is written.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool whole = self.is_contiguous() && source.is_contiguous() && self.dtype() == source.dtype() &&
                     self.sizes() == source.sizes() && self.is_neg() == source.is_neg();
  if (whole || (self.is_cpu() && source.is_cpu())) {
    return at::native::copy_(self, source, non_blocking);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  if (self.device() == source.device()) {
    log_access(source, false);
    on_host(self).copy_(on_host(source));
    if (captures(self.device())) {
      again(self.device(), [to = on_host(self), from = on_host(source)] { to.copy_(from); });
    }
    log_access(self, true);
    return self;
  }
  // To where it is wanted as it is, and there into its place.
  const at::Tensor dense = at::empty(source.sizes(), source.options()).copy_(source);
  const at::Tensor there = at::empty(source.sizes(), source.options().device(self.device()));
  at::native::copy_(const_cast<at::Tensor&>(there), dense, non_blocking);
  return self.copy_(there);
}

bool runs_on_cpu(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    const std::string type = argument.type()->str();
    if (type.find("Tensor") != std::string::npos) {
      return true;
    }
  }
  return false;
}

// What is asked of a tensor itself, or makes memory.
const std::set<std::string> kKept = {"aten::set_",      "aten::resize_",       "aten::record_stream",
                                     "aten::is_pinned", "aten::_pin_memory",   "aten::_unsafe_view",
                                     "aten::empty",     "aten::empty_strided", "aten::is_set_to",
                                     "aten::copy_",     "aten::_reshape_alias"};

// Made of other operators on every device, but of others on a GPU than on the CPU: the CPU's bits are wanted.
const std::set<std::string> kComposite = {"aten::convolution", "aten::convolution_backward"};

std::vector<torch::Library>& libraries() {
  static auto* const kept = new std::vector<torch::Library>;
  return *kept;
}

void take_over() {
  for (const char* name_space : {"aten", "gpipe_fast"}) {
    libraries().emplace_back(torch::Library::IMPL, name_space, c10::DispatchKey::CUDA, __FILE__, __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findOp(name);
      const bool ours = name.name.rfind(std::string(name_space) + "::", 0) == 0 && op.has_value();
      if (!ours || !op->hasSchema()) {
        continue;
      }
      const bool of_both = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && runs_on_cpu(*op);
      if (!(of_both || kComposite.count(name.name) != 0) || kKept.count(name.name) != 0 ||
          is_view(op->schema()) || !takes_tensors(op->schema())) {
        continue;
      }
      const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      libraries().back().impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    }
  }
  libraries().front().impl("copy_", TORCH_FN(copy_));
}

// Of kernels that are registered twice.
class Silent : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

[[maybe_unused]] const bool taken_over = [] {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  take_over();
  return true;
}();

}  // namespace
