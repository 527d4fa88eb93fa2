// One head's vector held by a warp, consecutive channels in a lane: reading it, and the change of basis.
// Macro: HEAD_DIM.
#pragma once
#include <cuda_bf16.h>

#include "common.cuh"

constexpr int OWN = HEAD_DIM / 32;  // consecutive channels of a lane

// `dtype`: 0 float32, 1 float16, 2 bfloat16.
__device__ __forceinline__ float load_value(const void* x, size_t index, int dtype) {
  if (dtype == 0) return static_cast<const float*>(x)[index];
  if (dtype == 1) return __half2float(static_cast<const __half*>(x)[index]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[index]);
}

template <typename T>
struct alignas(OWN * sizeof(T) < 16 ? OWN * sizeof(T) : 16) Own {
  T values[OWN];
};
// A lane's values of a vector at `index`, in as few loads as may be.
__device__ __forceinline__ void load_own(float (&v)[OWN], const void* x, size_t index, int dtype) {
  auto load = [&](auto zero, auto convert) {
    using T = decltype(zero);
    const auto own = *reinterpret_cast<const Own<T>*>(static_cast<const T*>(x) + index);
#pragma unroll
    for (int e = 0; e < OWN; e++) v[e] = convert(own.values[e]);
  };
  if (dtype == 0) load(0.f, [](float x) { return x; });
  else if (dtype == 1) load(__half(), [](__half x) { return __half2float(x); });
  else load(__nv_bfloat16(), [](__nv_bfloat16 x) { return __bfloat162float(x); });
}

// The normalised Hadamard matrix after `signs` (may be null).
__device__ __forceinline__ void rotate_basis(float (&v)[OWN], const float* signs, int lane) {
#pragma unroll
  for (int e = 0; e < OWN; e++)
    if (signs) v[e] *= signs[lane * OWN + e];
#pragma unroll
  for (int s = 1; s < OWN; s <<= 1)
#pragma unroll
    for (int e = 0; e < OWN; e++)
      if (!(e & s)) {
        const float x = v[e], y = v[e | s];
        v[e] = x + y, v[e | s] = x - y;
      }
#pragma unroll
  for (int s = 1; s < 32; s <<= 1)
#pragma unroll
    for (int e = 0; e < OWN; e++) {
      const float other = __shfl_xor_sync(~0u, v[e], s);
      v[e] = lane & s ? other - v[e] : v[e] + other;
    }
#pragma unroll
  for (int e = 0; e < OWN; e++) v[e] *= rsqrtf((float)HEAD_DIM);
}
