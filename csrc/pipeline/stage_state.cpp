#include "pipeline/stage_state.h"

namespace gpipe_fast {

void StageState::bind(const std::shared_ptr<Program>& program) {
  if (bound_.insert(program).second) program->bind(parameters);
}

}  // namespace gpipe_fast
