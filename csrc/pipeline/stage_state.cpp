#include "pipeline/stage_state.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <optional>
#include <utility>

namespace gpipe_fast {

// Autograd's graphs of layers in Python keep the buffers that these layers read, and check their versions. PyTorch's
// batch norm writes running statistics without a new version (pytorch/pytorch#13402, #120622), so programs do, too.
void StageState::write_buffer(int64_t index) {
  const at::NoGradGuard no_grad;
  const at::Tensor own = module_buffers[index], latest = std::exchange(forward.buffers[index], own);
  if (latest.is_same(own)) return;
  std::optional<at::AutoDispatchBelowADInplaceOrView> keeps_version;
  if (new_versions.count(index) == 0) keeps_version.emplace();
  own.copy_(latest);
  Stream::current_on(own.device()).record_use(latest);
}

void StageState::bind(const std::shared_ptr<Program>& program) {
  if (bound_.insert(program).second) program->bind(parameters, parameter_casts_);
}

void StageState::release_programs() {
  for (const auto& program : bound_) program->release_casts();
  bound_.clear();
  parameter_casts_.clear();
}

}  // namespace gpipe_fast
