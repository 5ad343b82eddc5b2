// Operators on the devices of runtime/: the CPU's operators compute them in the same memory. Reads and writes are
// logged with their stream.
//
// Operators compute immediately; under capture, again at every launch of the graph; with deferred work
// (runtime/deferred.h), only later. The shapes of deferred results are found by running the operator with zeros; an
// operator whose result shapes depend on values, such as `nonzero`, synchronizes its stream, as on a GPU.
//
// Load this library after torch. It replaces every kernel that is registered for CUDA by one that treats tensors on a
// fake device as tensors on the CPU. Views are not replaced, and copies between contiguous tensors of one dtype go
// through the runtime. The operator named by FAKE_CUDA_SYNCHRONIZES synchronizes its stream, so it cannot be
// captured. With FAKE_CUDA_NAMES, every operator is marked in the log by name; a casting copy also by both dtypes and
// the source address, and each casting copy of an operator that copies several tensors by a mark of its own.

#include "call.h"
#include "work.h"

#include <ATen/ATen.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Copy.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace fake_operators {
namespace {

void call_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { call(op, stack); }

// Copies between devices as torch's kernel does: on the source's stream, ordered before and after with the target's
// stream.
void copy_between(const at::Tensor& self, const at::Tensor& source) {
  const auto from = c10::cuda::getCurrentCUDAStream(source.device().index());
  const auto to = c10::cuda::getCurrentCUDAStream(self.device().index());
  const auto wait_for = [](const c10::cuda::CUDAStream& later, const c10::cuda::CUDAStream& stream) {
    c10::Event event(c10::DeviceType::CUDA);
    event.record(stream.unwrap());
    event.block(later.unwrap());
  };
  const auto access = [&](const at::Tensor& tensor, int writes) {
    const c10::cuda::CUDAGuard guard(source.device());
    C10_CUDA_CHECK(fake_cuda_access(from.stream(), tensor.const_data_ptr(), extent_bytes(tensor), writes));
  };
  wait_for(from, to);
  access(source, 0);
  compute_or_enqueue(source.device(), [to = cpu_alias(self), from = cpu_alias(source)] { to.copy_(from); });
  access(self, 1);
  wait_for(to, from);
}

// Copies as torch does: through the runtime where no kernel is needed, otherwise with a kernel on the target's device.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool whole = self.is_contiguous() && source.is_contiguous() && self.dtype() == source.dtype() &&
                     self.sizes() == source.sizes() && self.is_neg() == source.is_neg();
  if (whole || (self.is_cpu() && source.is_cpu())) {
    return at::native::copy_(self, source, non_blocking);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  if (self.device() == source.device()) {
    const std::string casts =
        self.dtype() == source.dtype()
            ? ""
            : c10::str("\t", source.scalar_type(), "\t", self.scalar_type(), "\t", source.const_data_ptr());
    log_name(self.device(), "aten::copy_" + casts);
    log_access(source, false);
    compute_or_enqueue(self.device(), [to = cpu_alias(self), from = cpu_alias(source)] { to.copy_(from); });
    log_access(self, true);
    return self;
  }
  if (self.is_cuda() && source.is_cuda()) {
    copy_between(self, source);
    return self;
  }
  // Copies between host and device through a contiguous tensor on the target's device.
  const at::Tensor dense = at::empty(source.sizes(), source.options()).copy_(source);
  const at::Tensor on_device = at::empty(source.sizes(), source.options().device(self.device()));
  at::native::copy_(const_cast<at::Tensor&>(on_device), dense, non_blocking);
  return self.copy_(on_device);
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

// Operators that only change metadata, allocate memory, or are implemented here.
const std::set<std::string> kOwnKernels = {"aten::set_",      "aten::resize_",       "aten::record_stream",
                                           "aten::is_pinned", "aten::_pin_memory",   "aten::_unsafe_view",
                                           "aten::empty",     "aten::empty_strided", "aten::is_set_to",
                                           "aten::copy_",     "aten::_reshape_alias"};

// Composite operators that call different operators on a GPU than on the CPU. Tests expect the CPU's bits.
const std::set<std::string> kComposite = {"aten::convolution", "aten::convolution_backward"};

std::vector<torch::Library>& libraries() {
  static auto* const kept = new std::vector<torch::Library>;
  return *kept;
}

void replace_cuda_kernels() {
  for (const char* name_space : {"aten", "gpipe_fast"}) {
    libraries().emplace_back(torch::Library::IMPL, name_space, c10::DispatchKey::CUDA, __FILE__, __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findOp(name);
      const bool ours = name.name.rfind(std::string(name_space) + "::", 0) == 0 && op.has_value();
      if (!ours || !op->hasSchema()) {
        continue;
      }
      const bool has_both_kernels = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && runs_on_cpu(*op);
      if (!(has_both_kernels || kComposite.count(name.name) != 0) || kOwnKernels.count(name.name) != 0 ||
          is_view(op->schema()) || !takes_tensors(op->schema())) {
        continue;
      }
      const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      libraries().back().impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&call_on_cpu>());
    }
  }
  libraries().front().impl("copy_", TORCH_FN(copy_));
}

// Ignores the warnings about kernels that are registered twice.
class IgnoreWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

[[maybe_unused]] const bool replaced = [] {
  IgnoreWarnings silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  replace_cuda_kernels();
  return true;
}();

}  // namespace
}  // namespace fake_operators
