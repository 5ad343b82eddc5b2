#include "pipeline/plan.h"

#include <algorithm>

namespace gpipe_fast {

std::shared_ptr<const Segment> StagePlan::segment(int32_t microbatch, size_t position, int64_t layer,
                                                  const Boundary& boundary, const Skips& skips) const {
  Chain& chain = chains.at(microbatch);
  if (has_fixed_chains) return chain.at(position);
  // After layers have run in Python, because they are new, so do they for the next micro-batch: a program would
  // write buffers that the autograd graph of the run in Python has saved.
  bool are_new = false;
  if (microbatch > 0 && position < chains[microbatch - 1].size()) {
    const Segment& before = *chains[microbatch - 1][position];
    are_new = before.begin == layer && before.is_single_use();
  }
  if (!are_new && position < chain.size() && chain[position]->accepts_inputs(layer, boundary, skips))
    return chain[position];
  chain.resize(position);
  chain.push_back(finder->find(layer, microbatch, boundary, skips, are_new));
  return chain.back();
}

std::shared_ptr<const Segment> StagePlan::fallback(int32_t microbatch, const Segment& segment,
                                                   const Tensors& tangents) const {
  if (!has_fixed_chains) chains.at(microbatch).clear();  // so that the next forward searches again
  return finder->fallback(segment, tangents);
}

bool StagePlan::is_lowered() const {
  return has_fixed_chains && std::all_of(chains.begin(), chains.end(), [](const Chain& chain) {
           return std::all_of(chain.begin(), chain.end(),
                              [](const auto& segment) { return segment->is_lowered(); });
         });
}

bool Plan::is_lowered() const {
  return std::all_of(stages.begin(), stages.end(), [](const StagePlan& stage) { return stage.is_lowered(); });
}

}  // namespace gpipe_fast
