// Parameters in other dtypes, as under autocast: computed once, and shared by the programs of a stage.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace gpipe_fast {

// The casts of one stage during one run. Not thread-safe: a stage has one worker.
class ParameterCasts {
 public:
  // A parameter's index, and the dtype it is cast to.
  using Key = std::pair<int64_t, at::ScalarType>;

  // Computes the casts that are missing, on the current stream. A cast has the sizes and strides of its parameter,
  // which must fill a block of memory without gaps.
  void compute(const std::vector<Key>& keys, const std::vector<at::Tensor>& parameters);
  const at::Tensor& at(const Key& key) const { return casts_.at(key); }
  void clear() { casts_.clear(); }
  int64_t bytes() const;

 private:
  std::map<Key, at::Tensor> casts_;
};

}  // namespace gpipe_fast
