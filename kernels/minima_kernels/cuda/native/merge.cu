// Merges the partials of each row and head, per-request and cohort ones of all formats together:
//   m = max m_j,  l = sum 2^(m_j - m) l_j,  out = sum 2^(m_j - m) O_j / l
// turns the result back where the queries were not given rotated, and merges it with attention of the same row to
// tokens elsewhere, where that is given. Partials below `num_floats` are sums in
// 32 bits; those from there on are cohort rows, 16-bit integers of a step for each row, in the order that
// cohort.cuh writes. unit = row * query heads + head.
// Macros: HEAD_DIM, SPLIT (groups of threads that share out the partials of a row and head).
#include "channels.cuh"

constexpr int LANES = HEAD_DIM / 4, THREADS = LANES * SPLIT;  // four channels of a partial at once
// Before weights are known a group fetches this many partials, out of so many lists of 32.
constexpr int TURNS = 4, EARLY = TURNS * SPLIT, LISTS = EARLY > 32 ? EARLY / 32 : 1;
constexpr int BLOCKS = 1536 / THREADS < 32 ? 1536 / THREADS : 32;  // of a multiprocessor, as the host counts on
constexpr float LOG2_E = 1.44269504089f;
constexpr int ENDS = THREADS < HEAD_DIM ? HEAD_DIM / THREADS : 1;  // channels of a thread in the end
static_assert(32 % SPLIT == 0, "whole turns of a list");

// Two integers of a cohort's partial, which are the low halves of floats.
__device__ __forceinline__ float2 unpack_part(uint32_t x) {
  return make_float2(__uint_as_float(prmt(x, 0x4B00u, 0x5410)) - PART_ZERO,
                     __uint_as_float(prmt(x, 0x4B00u, 0x5432)) - PART_ZERO);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
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
  // Reference, sum, and what values are to be multiplied by.
  auto size_of = [&](int p) {
    const float2 ml = p >= 0 ? part_ml[p] : make_float2(NO_SCORE, 0.f);
    return make_float3(ml.x, ml.y, p >= num_floats ? part_step[p - num_floats] : 1.f);
  };
  auto fetch = [&](int p) {
    if (p < 0) return make_uint4(0, 0, 0, 0);
    if (p < num_floats) {
      const float* from = part_o + (size_t)p * HEAD_DIM + channel;
      const uint2 a = *reinterpret_cast<const uint2*>(from), b = *reinterpret_cast<const uint2*>(from + 8);
      return make_uint4(a.x, a.y, b.x, b.y);
    }
    const uint2 words = reinterpret_cast<const uint2*>(part_rows + (size_t)(p - num_floats) * HEAD_DIM)[c];
    return make_uint4(words.x, words.y, 0, 0);
  };
  // Every warp works out the weights for itself, a partial per lane.
  int list[LISTS];
  float3 known[LISTS];
  uint4 early[TURNS];
#pragma unroll
  for (int n = 0; n < LISTS; n++) list[n] = listed(start + 32 * n + lane);
  depend_wait();
  depend_go();
  float M = NO_SCORE, L = 0.f, o[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int n = 0; n < LISTS; n++) known[n] = size_of(list[n]);
#pragma unroll
  for (int i = 0; i < TURNS; i++) early[i] = fetch(__shfl_sync(~0u, list[i * SPLIT / 32], i * SPLIT % 32 + y));
#pragma unroll
  for (int n = 0; n < LISTS; n++) M = fmaxf(M, known[n].x);
#pragma unroll 1
  for (int i = start + 32 * LISTS + lane; i < stop; i += 32) M = fmaxf(M, part_ml[unit_partials[i]].x);
#pragma unroll
  for (int s = 16; s; s >>= 1) M = fmaxf(M, __shfl_xor_sync(~0u, M, s));
  auto weigh = [&](int p, float3 size) {
    const float weight = p >= 0 ? exp2_fast(size.x - M) : 0.f;
    L += size.y * weight;
    return weight * size.z;
  };
  auto add = [&](int p, float weight, uint4 x) {
    float2 a = make_float2(__uint_as_float(x.x), __uint_as_float(x.y));
    float2 b = make_float2(__uint_as_float(x.z), __uint_as_float(x.w));
    if (p >= num_floats) a = unpack_part(x.x), b = unpack_part(x.y);
    o[0] = fmaf(a.x, weight, o[0]), o[1] = fmaf(a.y, weight, o[1]);
    o[2] = fmaf(b.x, weight, o[2]), o[3] = fmaf(b.y, weight, o[3]);
  };
  auto add_rest = [&](int list, float weight, int i, int count) {
#pragma unroll 1
    for (; i < count; i += SPLIT) {
      const int p = __shfl_sync(~0u, list, i + y);
      add(p, __shfl_sync(~0u, weight, i + y), fetch(p));
    }
  };
#pragma unroll
  for (int n = 0; n < LISTS; n++) {
    const float weight = weigh(list[n], known[n]);
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      const int from = i * SPLIT - 32 * n;
      if (from < 0 || from >= 32) continue;
      add(__shfl_sync(~0u, list[n], from + y), __shfl_sync(~0u, weight, from + y), early[i]);
    }
    if (EARLY < 32) add_rest(list[n], weight, EARLY, min(32, stop - start));
  }
#pragma unroll 1
  for (int at = start + 32 * LISTS; at < stop; at += 32) {
    const int mine = listed(at + lane);
    add_rest(mine, weigh(mine, size_of(mine)), 0, min(32, stop - at));
  }
#pragma unroll
  for (int s = 16; s; s >>= 1) L += __shfl_xor_sync(~0u, L, s);
  *reinterpret_cast<float2*>(&sums[y][channel]) = make_float2(o[0], o[1]);
  *reinterpret_cast<float2*>(&sums[y][channel + 8]) = make_float2(o[2], o[3]);
  __syncthreads();
  if (d >= HEAD_DIM) return;
  constexpr int LAST = HEAD_DIM / ENDS;  // threads that are left; the channels of one are so far apart
  float v[ENDS];
#pragma unroll
  for (int e = 0; e < ENDS; e++) {
    v[e] = 0.f;
#pragma unroll
    for (int i = 0; i < SPLIT; i++) v[e] += sums[i][d + e * LAST];
    v[e] = L == 0.f ? 0.f : v[e] / L;  // what is no number stays none
  }
  if (rotate) {
#pragma unroll
    for (int s = 1; s < 32; s <<= 1)
#pragma unroll
      for (int e = 0; e < ENDS; e++) {
        const float other = __shfl_xor_sync(~0u, v[e], s);
        v[e] = d & s ? other - v[e] : v[e] + other;
      }
#pragma unroll
    for (int s = 32; s < LAST; s <<= 1) {  // in turns in two rows, so that one barrier each is enough
      float* row = sums[s == 64];
#pragma unroll
      for (int e = 0; e < ENDS; e++) row[d + e * LAST] = v[e];
      sync_threads<LAST>(1);
#pragma unroll
      for (int e = 0; e < ENDS; e++) {
        const float other = row[(d ^ s) + e * LAST];
        v[e] = d & s ? other - v[e] : v[e] + other;
      }
    }
    if constexpr (ENDS == 2) {
      const float low = v[0];
      v[0] = low + v[1], v[1] = low - v[1];
    }
  }
  float size = L == 0.f ? NO_SCORE : M + log2f(L), ours = 1.f, theirs = 0.f;  // log2 of the sum of exp
  if (other_out) {
    const float other_size = fmaxf(other_lse[unit] * LOG2_E, NO_SCORE), top = fmaxf(size, other_size);
    ours = exp2f(size - top), theirs = exp2f(other_size - top);
    size = top + log2f(ours + theirs);
  }
#pragma unroll
  for (int e = 0; e < ENDS; e++) {
    const int channel = d + e * LAST;
    const size_t at = (size_t)unit * HEAD_DIM + channel;
    if (rotate) v[e] *= rsqrtf((float)HEAD_DIM);
    if (rotate && signs) v[e] *= signs[channel];
    if (other_out) v[e] = (v[e] * ours + load_value(other_out, at, dtype) * theirs) / (ours + theirs);
    if (dtype == 0) static_cast<float*>(out)[at] = v[e];
    else if (dtype == 1) static_cast<__half*>(out)[at] = __float2half(v[e]);
    else static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16(v[e]);
  }
  if (d == 0) lse[unit] = size <= 0.5f * NO_SCORE ? -INFINITY : size / LOG2_E;
}

// Page mass from log2 of each page's sum: its share of the whole row. One thread per entry and head.
extern "C" __global__ void __launch_bounds__(256)
    normalise_mass(float* mass, const int* entry_rows, const float* lse, int num_entries, int num_heads) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  const bool is_there = i < num_entries * num_heads;
  // The sums were there before the merge let this kernel begin; what they are shares of is not.
  const int row = is_there ? entry_rows[i / num_heads] : 0;
  const float sum = is_there ? mass[i] : 0.f;
  depend_wait();
  if (is_there) mass[i] = exp2f(sum - lse[row * num_heads + i % num_heads] * LOG2_E);
}
