// Merges the partials of each row and head, per-request and cohort ones of all formats together:
//   m = max m_j,  l = sum 2^(m_j - m) l_j,  out = sum 2^(m_j - m) O_j / l
// and turns the result back where the queries were not given rotated. Partials below `num_floats` are sums in
// 32 bits; those from there on are cohort rows, divided by their l and by the unit of their 64 rows, in 16 bits
// and the order that cohort_decode.cu writes. unit = row * query heads + head.
// Macros: HEAD_DIM, SPLIT (threads that share out the partials of one channel).
#include <cuda_bf16.h>

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(HEAD_DIM * SPLIT)
    merge(const float* part_o, const __half* part_rows, const float* part_unit, const float2* part_ml, int num_floats,
          const int* unit_start, const int* unit_partials, int rotate, const float* signs, void* out, int dtype,
          float* lse) {
  __shared__ float x[SPLIT][HEAD_DIM];
  const int unit = blockIdx.x, d = threadIdx.x, y = threadIdx.y, lane = d & 31;
  const int start = unit_start[unit], stop = unit_start[unit + 1];
  const int place = (d & ~31) + (d >> 1 & 3) * 8 + (d >> 3 & 3) * 2 + (d & 1);
  depend_wait();
  depend_go();
  // Every warp works out the weights for itself, a partial per lane.
  float M = NO_SCORE, L = 0.f, o = 0.f;
  for (int i = start + lane; i < stop; i += 32) M = fmaxf(M, part_ml[unit_partials[i]].x);
#pragma unroll
  for (int s = 16; s; s >>= 1) M = fmaxf(M, __shfl_xor_sync(~0u, M, s));
  for (int first = start; first < stop; first += 32) {
    const int count = min(32, stop - first);
    int partial = 0;
    float weight = 0.f;
    if (lane < count) {
      partial = unit_partials[first + lane];
      const float2 ml = part_ml[partial];
      weight = exp2_fast(ml.x - M);
      L += ml.y * weight;
      if (partial >= num_floats) weight *= ml.y * part_unit[(partial - num_floats) / 64];
    }
#pragma unroll 8
    for (int i = y; i < count; i += SPLIT) {
      const int p = __shfl_sync(~0u, partial, i);
      const float f = __shfl_sync(~0u, weight, i);
      const float v = p < num_floats ? part_o[(size_t)p * HEAD_DIM + d]
                                     : __half2float(part_rows[(size_t)(p - num_floats) * HEAD_DIM + place]);
      o = fmaf(v, f, o);
    }
  }
#pragma unroll
  for (int s = 16; s; s >>= 1) L += __shfl_xor_sync(~0u, L, s);
  if (SPLIT > 1) {
    x[y][d] = o;
    __syncthreads();
    if (y) return;
#pragma unroll
    for (int i = 1; i < SPLIT; i++) o += x[i][d];
  }
  float v = L > 0.f ? o / L : 0.f;
  if (rotate) {
#pragma unroll
    for (int s = 1; s < 32; s <<= 1) {
      const float other = __shfl_xor_sync(~0u, v, s);
      v = d & s ? other - v : v + other;
    }
#pragma unroll
    for (int s = 32; s < HEAD_DIM; s <<= 1) {  // only the threads of y = 0 are left
      x[0][d] = v;
      sync_threads<HEAD_DIM>(1);
      const float other = x[0][d ^ s];
      sync_threads<HEAD_DIM>(1);
      v = d & s ? other - v : v + other;
    }
    v *= rsqrtf((float)HEAD_DIM);
    if (signs) v *= signs[d];
  }
  const size_t at = (size_t)unit * HEAD_DIM + d;
  if (dtype == 0) static_cast<float*>(out)[at] = v;
  else if (dtype == 1) static_cast<__half*>(out)[at] = __float2half(v);
  else static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16(v);
  if (d == 0) lse[unit] = L > 0.f ? (M + log2f(L)) * 0.69314718056f : -INFINITY;
}

// Page mass from log2 of each page's sum: its share of the whole row. One thread per entry and head.
extern "C" __global__ void __launch_bounds__(256)
    normalise_mass(float* mass, const int* entry_rows, const float* lse, int num_entries, int num_heads) {
  depend_wait();
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= num_entries * num_heads) return;
  const int row = entry_rows[i / num_heads];
  mass[i] = exp2f(mass[i] - lse[row * num_heads + i % num_heads] * 1.44269504089f);
}
