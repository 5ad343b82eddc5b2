#include "pipeline/plan.h"

namespace gpipe_fast {
namespace {

bool matches(const Layout& layout, const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() && layout.matches(tensor);
}

}  // namespace

bool Segment::fits(int64_t layer, const Boundary& boundary, const Skips& skips) const {
  if (layer != begin) return false;
  if (python) return !provisional;
  const Form& form = *boundary.form;
  if (takes->structure != form.structure || takes->needs_gradient != form.needs_gradient) return false;
  size_t next = 0;
  for (const at::Tensor& tensor : boundary.tensors) {
    if (!matches(inputs.at(next++), tensor)) return false;
  }
  for (size_t i = 0; i < pops.size(); ++i) {
    const Skip& skip = skips.at(pops[i]);
    if (takes->skips[i].has_value() != skip.tensor.defined()) return false;
    if (!skip.tensor.defined()) continue;
    if (*takes->skips[i] != skip.needs_gradient || !matches(inputs.at(next++), skip.tensor)) return false;
  }
  return true;
}

bool Segment::expects(const Tensors& arrived) const {
  for (size_t i = 0; i < arrived.size(); ++i) {
    if (arrived[i].defined() != tangents.at(i).has_value()) return false;
    if (arrived[i].defined() && !matches(*tangents[i], arrived[i])) return false;
  }
  return true;
}

std::shared_ptr<const Segment> StagePlan::segment(int32_t microbatch, size_t place, int64_t layer,
                                                  const Boundary& boundary, const Skips& skips) const {
  Chain& chain = chains.at(microbatch);
  if (place < chain.size() && (!find || chain[place]->fits(layer, boundary, skips))) return chain[place];
  chain.resize(place);
  chain.push_back(find(layer, microbatch, boundary, skips));
  return chain.back();
}

}  // namespace gpipe_fast
