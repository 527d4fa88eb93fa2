// Merges the partials of each row and head, per-request and cohort ones of all formats together:
//   m = max m_j,  l = sum 2^(m_j - m) l_j,  out = sum 2^(m_j - m) O_j / l
// and turns the result back where the queries were not given rotated. Partials are numbered by
// slot * 8 + column; unit = (row * KV heads + KV head) * blocks + block of eight heads of the group.
// Macros: HEAD_DIM, SPLIT (threads that share out the partials of one channel).
#include <cuda_bf16.h>

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(HEAD_DIM * SPLIT)
    merge(const float* part_o, const float2* part_ml, const int* unit_start, const int* unit_partials,
          int num_kv_heads, int group, int blocks, int rotate, const float* signs, void* out, int dtype, float* lse) {
  __shared__ float x[SPLIT][HEAD_DIM], totals[SPLIT];
  const int unit = blockIdx.x, n = blockIdx.y, d = threadIdx.x, y = threadIdx.y;
  const int head_in_group = unit % blocks * COLUMNS + n;
  if (head_in_group >= group) return;
  const int start = unit_start[unit], stop = unit_start[unit + 1];
  depend_wait();
  float M = NO_SCORE, L = 0.f, o = 0.f;
  for (int i = start; i < stop; i++) M = fmaxf(M, part_ml[unit_partials[i] + n].x);
#pragma unroll 4
  for (int i = start + y; i < stop; i += SPLIT) {
    const int p = unit_partials[i] + n;
    const float2 ml = part_ml[p];
    const float f = exp2_fast(ml.x - M);
    L += ml.y * f;
    o += part_o[(size_t)p * HEAD_DIM + d] * f;
  }
  if (SPLIT > 1) {
    x[y][d] = o;
    if (d == 0) totals[y] = L;
    __syncthreads();
    if (y) return;
#pragma unroll
    for (int i = 1; i < SPLIT; i++) o += x[i][d], L += totals[i];
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
      asm volatile("bar.sync 1, %0;" ::"n"(HEAD_DIM) : "memory");
      const float other = x[0][d ^ s];
      asm volatile("bar.sync 1, %0;" ::"n"(HEAD_DIM) : "memory");
      v = d & s ? other - v : v + other;
    }
    v *= rsqrtf((float)HEAD_DIM);
    if (signs) v *= signs[d];
  }
  const size_t head = (size_t)(unit / blocks) * group + head_in_group;
  if (dtype == 0) static_cast<float*>(out)[head * HEAD_DIM + d] = v;
  else if (dtype == 1) static_cast<__half*>(out)[head * HEAD_DIM + d] = __float2half(v);
  else static_cast<__nv_bfloat16*>(out)[head * HEAD_DIM + d] = __float2bfloat16(v);
  if (d == 0) lse[head] = L > 0.f ? (M + log2f(L)) * 0.69314718056f : -INFINITY;
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
