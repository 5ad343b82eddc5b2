// Conversions from the compute type of a kernel to its output type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace gpipe_fast {

// Converts as ATen does: a double is rounded to float before it is rounded to a 16-bit type. Explicit,
// because PyTorch's compiler flags disable the implicit conversions of __half and __nv_bfloat16.
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
