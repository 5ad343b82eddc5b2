#include "pipeline/plan.h"

#include <algorithm>

namespace gpipe_fast {

std::shared_ptr<const Segment> StagePlan::segment(int32_t microbatch, size_t position, int64_t layer,
                                                  const Boundary& boundary, const Skips& skips) const {
  Chain& chain = chains.at(microbatch);
  if (has_fixed_chains) return chain.at(position);
  if (position < chain.size() && chain[position]->accepts_inputs(layer, boundary, skips))
    return chain[position];
  chain.resize(position);
  chain.push_back(finder->find(layer, microbatch, boundary, skips));
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
