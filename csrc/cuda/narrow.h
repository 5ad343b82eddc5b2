// Conversions that kernels make before they store.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace gpipe_fast {

// As ATen converts, spelled out because torch's flags turn the halves' own conversions off: a double that becomes a half
// is rounded to float first.
template <typename T, typename C>
__device__ T narrow(C value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

}  // namespace gpipe_fast
