// Operators on the devices of runtime/: computed by the CPU's, in the same memory; what they read and write, and on which
// stream, is logged.
//
// They compute at once; when a stream is captured also at every launch; and where work is deferred (runtime/deferred.h)
// only later. What shapes their results then have is found by computing with zeros; where that needs values, as in
// `nonzero`, the stream is waited for, as on a GPU.
//
// Loaded after torch. In place of every kernel that is registered for CUDA there then is one that takes tensors on a
// fake device for tensors on the CPU. Views stay as they are, and copies of whole tensors go through the runtime. The
// operator that FAKE_CUDA_SYNCHRONIZES names waits for its stream, which cannot be captured. With FAKE_CUDA_NAMES every
// operator is marked in the log by its name; a copy that casts also by both types and the address that it reads.

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

void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { call(op, stack); }

// As torch's kernel does it from one GPU to another: on the source's stream, between what is on the target's.
void copy_between(const at::Tensor& self, const at::Tensor& source) {
  const auto from = c10::cuda::getCurrentCUDAStream(source.device().index());
  const auto to = c10::cuda::getCurrentCUDAStream(self.device().index());
  const auto follow = [](const c10::cuda::CUDAStream& later, const c10::cuda::CUDAStream& stream) {
    c10::Event event(c10::DeviceType::CUDA);
    event.record(stream.unwrap());
    event.block(later.unwrap());
  };
  const auto access = [&](const at::Tensor& tensor, int writes) {
    const c10::cuda::CUDAGuard guard(source.device());
    C10_CUDA_CHECK(fake_cuda_access(from.stream(), tensor.const_data_ptr(), extent(tensor), writes));
  };
  follow(from, to);
  access(source, 0);
  compute_or_put(source.device(), [to = on_host(self), from = on_host(source)] { to.copy_(from); });
  access(self, 1);
  follow(to, from);
}

// As torch does it where no kernel is needed: through the runtime. Else on the device that is written.
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
    compute_or_put(self.device(), [to = on_host(self), from = on_host(source)] { to.copy_(from); });
    log_access(self, true);
    return self;
  }
  if (self.is_cuda() && source.is_cuda()) {
    copy_between(self, source);
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
}  // namespace fake_operators
