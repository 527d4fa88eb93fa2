// What TileLang's headers give its sources, as far as the kernels here use it.
#pragma once
#include <cuda_fp8.h>

#include "emulated_machine.h"

using half_t = __half;
using bfloat16_t = __nv_bfloat16;
using fp8_e4_t = __nv_fp8_e4m3;

template <int COUNT>
struct alignas(COUNT) Fp8Values {
  fp8_e4_t values[COUNT];
};
using fp8_e4_2_t = Fp8Values<2>;
using fp8_e4_4_t = Fp8Values<4>;
using fp8_e4_8_t = Fp8Values<8>;

namespace tl {
inline float warp_reduce_max(float value) {
  for (int by = 16; by; by /= 2) value = std::max(value, __shfl_xor_sync(~0u, value, by));
  return value;
}
}  // namespace tl
