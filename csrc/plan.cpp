#include "plan.h"

namespace gpipe_fast {
namespace {

bool matches(const Layout& layout, const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() && layout.matches(tensor);
}

}  // namespace

bool Segment::fits(int64_t layer, const Boundary& boundary) const {
  if (layer != begin) return false;
  if (python) return !provisional;
  if (inputs.size() != boundary.tensors.size()) return false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!matches(inputs[i], boundary.tensors[i])) return false;
  }
  return takes == boundary.form || *takes == *boundary.form;
}

bool Segment::expects(const Tensors& arrived) const {
  for (size_t i = 0; i < arrived.size(); ++i) {
    if (arrived[i].defined() != tangents.at(i).has_value()) return false;
    if (arrived[i].defined() && !matches(*tangents[i], arrived[i])) return false;
  }
  return true;
}

std::shared_ptr<const Segment> StagePlan::segment(int32_t microbatch, size_t place, int64_t layer,
                                                  const Boundary& boundary) const {
  Chain& chain = chains.at(microbatch);
  if (place < chain.size() && (!find || chain[place]->fits(layer, boundary))) return chain[place];
  chain.resize(place);
  chain.push_back(find(layer, microbatch, boundary));
  return chain.back();
}

}  // namespace gpipe_fast
