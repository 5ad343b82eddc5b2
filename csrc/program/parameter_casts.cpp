#include "program/parameter_casts.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_strided.h>

namespace gpipe_fast {

void ParameterCasts::compute(const std::vector<Key>& keys, const std::vector<at::Tensor>& parameters) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> from, to;
  for (const Key& key : keys) {
    at::Tensor& cast = casts_[key];
    if (cast.defined()) continue;
    const at::Tensor& parameter = parameters.at(key.first);
    cast = at::empty_strided(parameter.sizes(), parameter.strides(), parameter.options().dtype(key.second));
    from.push_back(parameter);
    to.push_back(cast);
  }
  if (!to.empty()) at::_foreach_copy_(to, from);  // on a GPU few kernels, whatever the number of parameters
}

int64_t ParameterCasts::bytes() const {
  int64_t sum = 0;
  for (const auto& entry : casts_) sum += static_cast<int64_t>(entry.second.nbytes());
  return sum;
}

}  // namespace gpipe_fast
