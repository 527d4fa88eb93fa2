// Merges the partials of each row and head, per-request and cohort ones of all formats together:
//   m = max m_j,  l = sum 2^(m_j - m) l_j,  out = sum 2^(m_j - m) O_j / l
// turns the result back where the queries were not given rotated, and merges it with attention of the same row to
// tokens elsewhere, where that is given. Partials below `num_floats` are sums in
// 32 bits; those from there on are cohort rows, 16-bit integers of a step for each row, in the order that
// cohort.cuh writes. unit = row * query heads + head.
// Macros: HEAD_DIM, SPLIT (groups of threads that share out the partials of a row and head).
#include "channels.cuh"

constexpr int LANES = HEAD_DIM / 4, THREADS = LANES * SPLIT;  // four channels of a partial at once
constexpr float LOG2_E = 1.44269504089f;
static_assert(THREADS >= HEAD_DIM && SPLIT <= 32, "a thread per channel in the end");

// Two integers of a cohort's partial, which are the low halves of floats.
__device__ __forceinline__ float2 unpack_part(uint32_t x) {
  return make_float2(__uint_as_float(prmt(x, 0x4B00u, 0x5410)) - PART_ZERO,
                     __uint_as_float(prmt(x, 0x4B00u, 0x5432)) - PART_ZERO);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    merge(const float* part_o, const uint16_t* part_rows, const float* part_step, const float2* part_ml, int num_floats,
          const int* unit_start, const int* unit_partials, int rotate, const float* signs, void* out, int dtype,
          float* lse, const void* other_out, const float* other_lse) {
  __shared__ float sums[SPLIT][HEAD_DIM];
  const int unit = blockIdx.x, d = threadIdx.x, y = d / LANES, c = d % LANES, lane = d & 31;
  // A cohort's places 4 c to 4 c + 3 hold this channel, the next one, and both plus 8.
  const int channel = (c >> 3) * 32 + (c & 1) * 16 + (c >> 1 & 3) * 2;
  // Lists were written before the kernels that this one may overlap began.
  const int start = unit_start[unit], stop = unit_start[unit + 1];
  auto listed = [&](int i) { return i < stop ? unit_partials[i] : -1; };
  auto sums_of = [&](int p) { return p >= 0 ? part_ml[p] : make_float2(NO_SCORE, 0.f); };
  // Every warp works out the weights for itself, a partial per lane; the first 64 are fetched at once.
  int partial = listed(start + lane), second = listed(start + 32 + lane);
  depend_wait();
  depend_go();
  float2 ml = sums_of(partial), second_ml = sums_of(second);
  float M = fmaxf(ml.x, second_ml.x), L = 0.f, o[4] = {0.f, 0.f, 0.f, 0.f};
  for (int i = start + 64 + lane; i < stop; i += 32) M = fmaxf(M, part_ml[unit_partials[i]].x);
#pragma unroll
  for (int s = 16; s; s >>= 1) M = fmaxf(M, __shfl_xor_sync(~0u, M, s));
  for (int first = start; first < stop; first += 32) {
    const int count = min(32, stop - first);
    if (first == start + 32) partial = second, ml = second_ml;
    if (first > start + 32) partial = listed(first + lane), ml = sums_of(partial);
    float weight = partial >= 0 ? exp2_fast(ml.x - M) : 0.f;
    L += ml.y * weight;
    if (partial >= num_floats) weight *= part_step[partial - num_floats];
#pragma unroll 4
    for (int i = 0; i < count; i += SPLIT) {
      const int p = __shfl_sync(~0u, partial, (i + y) & 31);
      const float f = __shfl_sync(~0u, weight, (i + y) & 31);
      if (i + y >= count) continue;
      float2 a, b;
      if (p < num_floats) {
        const float* from = part_o + (size_t)p * HEAD_DIM + channel;
        a = *reinterpret_cast<const float2*>(from), b = *reinterpret_cast<const float2*>(from + 8);
      } else {
        const uint2 words = reinterpret_cast<const uint2*>(part_rows + (size_t)(p - num_floats) * HEAD_DIM)[c];
        a = unpack_part(words.x), b = unpack_part(words.y);
      }
      o[0] = fmaf(a.x, f, o[0]), o[1] = fmaf(a.y, f, o[1]), o[2] = fmaf(b.x, f, o[2]), o[3] = fmaf(b.y, f, o[3]);
    }
  }
#pragma unroll
  for (int s = 16; s; s >>= 1) L += __shfl_xor_sync(~0u, L, s);
  *reinterpret_cast<float2*>(&sums[y][channel]) = make_float2(o[0], o[1]);
  *reinterpret_cast<float2*>(&sums[y][channel + 8]) = make_float2(o[2], o[3]);
  __syncthreads();
  if (d >= HEAD_DIM) return;
  float v = 0.f;
#pragma unroll
  for (int i = 0; i < SPLIT; i++) v += sums[i][d];
  v = L == 0.f ? 0.f : v / L;  // what is no number stays none
  if (rotate) {
#pragma unroll
    for (int s = 1; s < 32; s <<= 1) {
      const float other = __shfl_xor_sync(~0u, v, s);
      v = d & s ? other - v : v + other;
    }
#pragma unroll
    for (int s = 32; s < HEAD_DIM; s <<= 1) {  // in turns in two rows, so that one barrier each is enough
      float* row = sums[s == 64];
      row[d] = v;
      sync_threads<HEAD_DIM>(1);
      v = d & s ? row[d ^ s] - v : v + row[d ^ s];
    }
    v *= rsqrtf((float)HEAD_DIM);
    if (signs) v *= signs[d];
  }
  const size_t at = (size_t)unit * HEAD_DIM + d;
  float size = L == 0.f ? NO_SCORE : M + log2f(L);  // log2 of the sum of exp
  if (other_out) {
    const float other_size = fmaxf(other_lse[unit] * LOG2_E, NO_SCORE), top = fmaxf(size, other_size);
    const float ours = exp2f(size - top), theirs = exp2f(other_size - top);
    v = (v * ours + load_value(other_out, at, dtype) * theirs) / (ours + theirs);
    size = top + log2f(ours + theirs);
  }
  if (dtype == 0) static_cast<float*>(out)[at] = v;
  else if (dtype == 1) static_cast<__half*>(out)[at] = __float2half(v);
  else static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16(v);
  if (d == 0) lse[unit] = size <= 0.5f * NO_SCORE ? -INFINITY : size / LOG2_E;
}

// Page mass from log2 of each page's sum: its share of the whole row. One thread per entry and head.
extern "C" __global__ void __launch_bounds__(256)
    normalise_mass(float* mass, const int* entry_rows, const float* lse, int num_entries, int num_heads) {
  depend_wait();
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= num_entries * num_heads) return;
  const int row = entry_rows[i / num_heads];
  mass[i] = exp2f(mass[i] - lse[row * num_heads + i % num_heads] * LOG2_E);
}
