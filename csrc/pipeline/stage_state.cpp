#include "pipeline/stage_state.h"

namespace gpipe_fast {

void StageState::bind(const std::shared_ptr<Program>& program) {
  if (bound_.insert(program).second) program->bind(parameters, parameter_casts_);
}

void StageState::release_programs() {
  for (const auto& program : bound_) program->release_casts();
  bound_.clear();
  parameter_casts_.clear();
}

}  // namespace gpipe_fast
