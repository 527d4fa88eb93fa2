// What the kernels over pages that many rows read have in common: their work list, rings of tiles, scales, the
// softmax of a block of rows and its partials.
// Macro: HEAD_DIM.
#pragma once
#include <limits.h>

#include "common.cuh"

constexpr int CONSUMERS = 2, ROWS = 64;
constexpr int SCALE_ROW = 20, SCALE_SET = 4 * SCALE_ROW;  // rows padded against bank conflicts
constexpr float HEADROOM = 32.f;  // largest V scale in units of the running one; P <= 2^10 * HEADROOM

// Pages [first, last) for one KV head and one or two blocks of rows.
struct Cohort {
  int rows;    // first block among the row lists
  int first, last;
  int slot;    // of the first consumer; the second has the next one
  int head;    // KV head
  int blocks;  // 1 or 2, and the first block's place among those of the readers << 8
  int entry;   // page entry of the first page and the first reader
  int stride;  // page entries per page: readers
};
static_assert(sizeof(Cohort) == 2 * sizeof(uint4), "load_cohort");
static_assert(SCALE_ROW % 4 == 0, "load_floats");

__device__ __forceinline__ Cohort load_cohort(const uint4* items, int index) {
  const uint4 a = __ldg(items + 2 * index), b = __ldg(items + 2 * index + 1);
  return {(int)a.x, (int)a.y, (int)a.z, (int)a.w, (int)b.x, (int)b.y, (int)b.z, (int)b.w};
}

// 1 / x of a power of two.
__device__ __forceinline__ float invert_power(float x) { return __uint_as_float(0x7F000000u - __float_as_uint(x)); }

// A place in a ring of N stages.
template <int N>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int by) {
    stage += by;
    if (stage >= N) stage -= N, phase ^= 1;
  }
};

// The V scales of a page, a pair per lane, in units of a power of two that is raised when the page's largest
// would pass HEADROOM units. `running` is the warp's, in shared memory.
__device__ __forceinline__ void use_unit(float2& scales, float* running, float* page_unit, int lane) {
  const float top = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(scales.x, scales.y))));
  float unit = *running;
  if (top > HEADROOM * unit || (unit == 0.f && top > 0.f)) unit = __uint_as_float(__float_as_uint(top) & 0x7F800000u);
  const float used = unit > 0.f ? unit : 1.f;
  const float inverse = invert_power(used);
  scales.x *= inverse, scales.y *= inverse;
  __syncwarp();
  if (lane == 0) *page_unit = used, *running = unit;
}

// Rows g and g + 8 of a warp: references and sums of their softmax in log2 units, sums still per lane.
struct BlockRows {
  float m0 = 0.f, m1 = 0.f, l0 = 0.f, l1 = 0.f, v_unit = 1.f;
  bool first = true;
};

// What the sums of earlier pages are to be multiplied by, and the sums of this one.
struct Weighed {
  bool moves;
  float f0, f1, sum0, sum1;
};

// The 16 scales of a lane's tokens.
__device__ __forceinline__ void load_scales(uint32_t at, float4* to) {
#pragma unroll
  for (int u = 0; u < 4; u++) to[u] = load_floats(at + u * 16);
}
// The one of score `x` of eight.
__device__ __forceinline__ float scale_of(const float4& scales, int x) {
  return x & 4 ? (x & 1 ? scales.w : scales.z) : (x & 1 ? scales.y : scales.x);
}

// Whether one of these is more than `limit`, which is not negative: then floats compare as their bits do.
__device__ __forceinline__ bool exceeds(const float* s, float limit) {
  int top[4] = {INT_MIN, INT_MIN, INT_MIN, INT_MIN};  // several, as each waits for the one before
#pragma unroll
  for (int i = 0; i < 32; i += 2)
    top[i / 2 % 4] = max3(top[i / 2 % 4], __float_as_int(s[i]), __float_as_int(s[i + 1]));
  return max(max3(top[0], top[1], top[2]), top[3]) > __float_as_int(limit);
}

// Scores of a page to weights. `s` has the references taken off already.
__device__ __forceinline__ Weighed weigh(BlockRows& rows, float* s, float page_unit) {
  Weighed done{false, 1.f, 1.f, 0.f, 0.f};
  // The reference of a row moves only when a weight would pass 2^10.
  done.moves = __any_sync(~0u, exceeds(s, 10.f) || page_unit != rows.v_unit) || rows.first;
  if (done.moves) {
    float x0 = NO_SCORE, x1 = NO_SCORE;
#pragma unroll
    for (int i = 0; i < 32; i++)
      if (i & 2) x1 = fmaxf(x1, s[i]); else x0 = fmaxf(x0, s[i]);
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) {
      x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, o));
      x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, o));
    }
    const float d0 = rows.first ? x0 - 4.f : fmaxf(x0 - 4.f, 0.f), d1 = rows.first ? x1 - 4.f : fmaxf(x1 - 4.f, 0.f);
    done.f0 = rows.first ? 0.f : exp2_fast(-d0), done.f1 = rows.first ? 0.f : exp2_fast(-d1);
    rows.m0 += d0, rows.m1 += d1;
    rows.l0 *= done.f0, rows.l1 *= done.f1;
    const float units = rows.v_unit * invert_power(page_unit);
    done.f0 *= units, done.f1 *= units;
    rows.v_unit = page_unit;
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] -= i & 2 ? d1 : d0;
    rows.first = false;
  }
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 32; i++) {
    s[i] = exp2_fast(s[i]);
    sums[i & 3] += s[i];
  }
  done.sum0 = sums[0] + sums[1], done.sum1 = sums[2] + sums[3];
  rows.l0 += done.sum0, rows.l1 += done.sum1;
  return done;
}
__device__ __forceinline__ void scale_weights(float* s, const float4* v_scales) {
#pragma unroll
  for (int i = 0; i < 32; i++) s[i] *= scale_of(v_scales[i / 8], i % 8);
}
// The same with scales loaded as they are needed: fewer registers.
__device__ __forceinline__ void scale_weights(float* s, uint32_t v_scales) {
#pragma unroll
  for (int u = 0; u < 4; u++) {
    const float4 v_scale = load_floats(v_scales + u * 16);
#pragma unroll
    for (int x = 0; x < 8; x++) s[u * 8 + x] *= scale_of(v_scale, x);
  }
}

// Writes log2 of the sums of exp of an item's page `p` for the rows of this block that are used.
__device__ __forceinline__ void write_row_mass(float* mass, const Cohort& item, int p, int block, float sum0, float sum1,
                                               const BlockRows& rows, const float* scale, int num_heads, int group,
                                               int warp, int lane) {
#pragma unroll
  for (int o = 1; o < 4; o <<= 1) {
    sum0 += __shfl_xor_sync(~0u, sum0, o);
    sum1 += __shfl_xor_sync(~0u, sum1, o);
  }
  if (lane & 3) return;
  const int row = ((item.blocks >> 8) + block) * ROWS + warp * 16 + (lane >> 2);
  auto put = [&](int stacked, float value) {
    const size_t entry = item.entry + p * item.stride + stacked / group;
    mass[entry * num_heads + item.head * group + stacked % group] = value;
  };
  if (scale[0] != 0.f) put(row, log2_fast(sum0) + rows.m0);
  if (scale[1] != 0.f) put(row + 8, log2_fast(sum1) + rows.m1);
}

// The partials of a block of rows: O as 16-bit integers of a step of the row's own, above their middle, the row's
// reference and sum, and its step.
__device__ __forceinline__ void write_rows(const float* O, BlockRows rows, int slot, float unit, uint4* part_o,
                                           float2* part_ml, float* part_step, int warp, int lane) {
  const int g = lane >> 2, j = lane & 3;
  // Magnitudes compared as integers: one that is no number is the largest and makes the row's step none.
  auto size = [](float x) { return __float_as_uint(x) & 0x7FFFFFFFu; };
  uint32_t most0 = 0, most1 = 0;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 8; i++) {
    most0 = max(most0, max(size(O[i * 4]), size(O[i * 4 + 1])));
    most1 = max(most1, max(size(O[i * 4 + 2]), size(O[i * 4 + 3])));
  }
#pragma unroll
  for (int o = 1; o < 4; o <<= 1) {
    rows.l0 += __shfl_xor_sync(~0u, rows.l0, o);
    rows.l1 += __shfl_xor_sync(~0u, rows.l1, o);
    most0 = max(most0, __shfl_xor_sync(~0u, most0, o));
    most1 = max(most1, __shfl_xor_sync(~0u, most1, o));
  }
  const float top0 = __uint_as_float(max(most0, size(1e-30f))), top1 = __uint_as_float(max(most1, size(1e-30f)));
  const size_t row = (size_t)slot * ROWS + warp * 16 + g;
  const float i0 = __fdividef(PART_MAX, top0), i1 = __fdividef(PART_MAX, top1);
  // The low half of a float at 2^23 is its integer.
  auto pack = [](float x, float y, float inverse) {
    return prmt(__float_as_uint(fmaf(x, inverse, PART_ZERO)), __float_as_uint(fmaf(y, inverse, PART_ZERO)), 0x5410);
  };
#pragma unroll
  for (int u = 0; u < HEAD_DIM / 32; u++) {  // place 32 u + 8 j + 2 y + e holds channel 32 u + 8 y + 2 j + e
    uint32_t x[4], y[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const float* o = O + (u * 4 + t) * 4;
      x[t] = pack(o[0], o[1], i0), y[t] = pack(o[2], o[3], i1);
    }
    part_o[row * (HEAD_DIM / 8) + u * 4 + j] = make_uint4(x[0], x[1], x[2], x[3]);
    part_o[(row + 8) * (HEAD_DIM / 8) + u * 4 + j] = make_uint4(y[0], y[1], y[2], y[3]);
  }
  if (j == 0) {
    part_ml[row] = make_float2(rows.l0 > 0.f ? rows.m0 : NO_SCORE, rows.l0);
    part_ml[row + 8] = make_float2(rows.l1 > 0.f ? rows.m1 : NO_SCORE, rows.l1);
    part_step[row] = top0 * (unit / PART_MAX), part_step[row + 8] = top1 * (unit / PART_MAX);
  }
}
