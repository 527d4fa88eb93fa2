// A step's new rows of one layer: RoPE on queries and keys, rotation of keys and values, and their
// place in open pages. One warp per row and head: query heads, KV heads of K, KV heads of V.
// Macros: HEAD_DIM, FORMAT of the pages (0 FP8, 1 F16, 2 BF16).
#include <cuda_fp8.h>

#include "channels.cuh"

constexpr float E4M3_MAX = 448.f, MIN_SCALE = 6.103515625e-05f;

__device__ __forceinline__ void store_value(void* x, size_t index, int dtype, float value) {
  if (dtype == 0) static_cast<float*>(x)[index] = value;
  else if (dtype == 1) static_cast<__half*>(x)[index] = __float2half(value);
  else static_cast<__nv_bfloat16*>(x)[index] = __float2bfloat16(value);
}

// `codes`, `scales`: of this head in the page.
__device__ __forceinline__ void store_row(const float (&v)[OWN], uint8_t* codes, uint8_t* scales, int slot, int lane) {
  if constexpr (FORMAT == 0) {
    float largest = 0.f;
#pragma unroll
    for (int e = 0; e < OWN; e++) largest = fmaxf(largest, fabsf(v[e]));
#pragma unroll
    for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
    const __half stored = __float2half_rn(fmaxf(largest / E4M3_MAX, MIN_SCALE));
    const float scale = __half2float(stored);
    uint16_t pairs[OWN / 2];
#pragma unroll
    for (int e = 0; e < OWN; e += 2)
      pairs[e / 2] = __nv_cvt_float2_to_fp8x2(make_float2(v[e] / scale, v[e + 1] / scale), __NV_SATFINITE, __NV_E4M3);
    uint8_t* to = codes + slot * HEAD_DIM + lane * OWN;
    if constexpr (OWN == 2) *reinterpret_cast<uint16_t*>(to) = pairs[0];
    else
#pragma unroll
      for (int e = 0; e < OWN / 4; e++) reinterpret_cast<uint32_t*>(to)[e] = pairs[2 * e] | (uint32_t)pairs[2 * e + 1] << 16;
    if (lane == 0) reinterpret_cast<__half*>(scales)[slot] = stored;
  } else {
    uint32_t* to = reinterpret_cast<uint32_t*>(codes + (slot * HEAD_DIM + lane * OWN) * 2);
#pragma unroll
    for (int e = 0; e < OWN; e += 2) {
      if constexpr (FORMAT == 1) {
        to[e / 2] = pack_half2(v[e], v[e + 1]);
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(v[e], v[e + 1]);
        to[e / 2] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
  }
}

// Strides are those of rows, in elements. `cosine`, `sine` [rows][HEAD_DIM], the sine negative in the
// first half. `q_out` [rows][heads][HEAD_DIM]; `k_out` the same of the first `k_rows` rows, in `dtype`
// (0 float32, 1 float16, 2 bfloat16). A row without a page (negative `page_bytes`) is not stored.
extern "C" __global__ void __launch_bounds__(256)
    append(const void* q, const void* k, const void* v, int q_stride, int k_stride, int v_stride, int dtype,
           int num_rows, int num_heads, int num_kv_heads, const float* cosine, const float* sine, const float* signs,
           void* q_out, void* k_out, int k_rows, uint8_t* share, const long long* page_bytes, const long long* slots,
           int v_codes, int k_scales, int v_scales) {
  const int job = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  const int vectors = num_heads + 2 * num_kv_heads, row = job / vectors, vector = job % vectors;
  if (row >= num_rows) return;
  const bool is_query = vector < num_heads, is_value = vector >= num_heads + num_kv_heads;
  const int head = is_query ? vector : is_value ? vector - num_heads - num_kv_heads : vector - num_heads;
  const void* from = is_query ? q : is_value ? v : k;
  const size_t start = (size_t)row * (is_query ? q_stride : is_value ? v_stride : k_stride) + head * HEAD_DIM;
  float x[OWN];
#pragma unroll
  for (int e = 0; e < OWN; e++) x[e] = load_value(from, start + lane * OWN + e, dtype);
  if (!is_value) {
#pragma unroll
    for (int e = 0; e < OWN; e++) {
      const size_t at = (size_t)row * HEAD_DIM + lane * OWN + e;
      const float other = __shfl_xor_sync(~0u, x[e], 16);  // half a head away
      x[e] = x[e] * cosine[at] + other * sine[at];
    }
    void* out = is_query ? q_out : row < k_rows ? k_out : nullptr;
    if (out) {
      const size_t to = ((size_t)row * (is_query ? num_heads : num_kv_heads) + head) * HEAD_DIM + lane * OWN;
#pragma unroll
      for (int e = 0; e < OWN; e++) store_value(out, to + e, dtype, x[e]);
    }
  }
  const long long page = page_bytes[row];
  if (is_query || page < 0) return;
  rotate_basis(x, signs, lane);
  constexpr int ROW_BYTES = HEAD_DIM * (FORMAT == 0 ? 1 : 2);
  uint8_t* base = share + page;
  store_row(x, base + (is_value ? v_codes : 0) + head * PAGE * ROW_BYTES,
            base + (is_value ? v_scales : k_scales) + head * PAGE * 2, (int)slots[row], lane);
}
