// What all decode kernels share: instructions by name, the work list, the merge inside a block.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

#include "machine.cuh"

constexpr int PAGE = 64;          // tokens of a page
constexpr int COLUMNS = 8;        // query columns (row, head) of a tile: the N of an MMA
constexpr int GRANULE = 128;      // unit of page addresses in bytes
constexpr float NO_SCORE = -1e30f;
// Partials of stacked rows are integers up to this, and this float at zero: 2^23 + 2^15.
constexpr float PART_MAX = 32767.f, PART_ZERO = 8421376.f;

// One piece of work: pages [first, last) of the page list for one KV head and one tile of columns.
struct Item {
  int tile;       // place of the tile and head among the query fragments
  int first;      // first page
  int last;       // behind the last page
  int slot;       // place of the partial
  int head;       // KV head
  int last_len;   // valid tokens of the last page
  int entry;      // page entry of the first page and the first row of the tile, for page mass
  int stride;     // page entries per page
};

__device__ __forceinline__ float2 unpack_half2(uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
// Loaded anew where it is needed: kept over a page loop it would take registers.
__device__ __forceinline__ Item load_item(const uint4* items, int index) {
  const uint4 a = load_here(items + 2 * index), b = load_here(items + 2 * index + 1);
  return {(int)a.x, (int)a.y, (int)a.z, (int)a.w, (int)b.x, (int)b.y, (int)b.z, (int)b.w};
}

// A warp's state: two columns (2j, 2j + 1) per lane, log2 units; totals are still per lane.
struct Running {
  float m0 = NO_SCORE, m1 = NO_SCORE, l0 = 0.f, l1 = 0.f;
};

__device__ __forceinline__ float sum_rows(float x) {
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
__device__ __forceinline__ float max_rows(float x) {
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

// What of an item is needed again after its pages: kept in shared memory, a copy for each warp, so that it is
// there at once and takes no registers.
struct Held {
  int slot;
  uint32_t columns;  // bit n: column n of the tile is a row's
};
// `columns[n]` of the tile: offset of the row among its page entries << 8 | head within the group, or -1.
__device__ __forceinline__ void hold_item(Held& held, const Item& item, const int* columns) {
  const int lane = threadIdx.x & 31;
  const uint32_t used = __ballot_sync(~0u, lane < COLUMNS && columns[lane & (COLUMNS - 1)] >= 0);
  if (lane == 0) held = {item.slot, used};
  __syncwarp();
}

// Merges the warps of a block and writes the partial of an item. `channel(i, half)` is the channel of
// accumulators O[i][0..1] (half 0) and O[i][2..3] (half 1) of this lane; `scratch` takes
// NUM_WARPS rows of `scratch_stride` bytes, at least DIM * 40 each; of `sums` each warp's row is its own until all
// are here.
template <int DIM, int NUM_WARPS, int WIDTH, typename Channel>
__device__ __forceinline__ void write_partial(float (*O)[4], Running run, float factor, uint8_t* scratch,
                                              int scratch_stride, float2 (*sums)[WIDTH], const Held& held,
                                              float* part_o, float2* part_ml, Channel channel) {
  constexpr int ROW = COLUMNS + 2;  // padded against bank conflicts
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const int slot = held.slot;
  const uint32_t columns = held.columns;
  run.l0 = sum_rows(run.l0);
  run.l1 = sum_rows(run.l1);
  if (g == 0) {
    sums[warp][2 * j] = make_float2(run.m0, run.l0);
    sums[warp][2 * j + 1] = make_float2(run.m1, run.l1);
  }
  __syncthreads();
  float M0 = NO_SCORE, M1 = NO_SCORE;
#pragma unroll
  for (int w = 0; w < NUM_WARPS; w++) {
    M0 = fmaxf(M0, sums[w][2 * j].x);
    M1 = fmaxf(M1, sums[w][2 * j + 1].x);
  }
  const float f0 = exp2_fast(run.m0 - M0) * factor, f1 = exp2_fast(run.m1 - M1) * factor;
  float* mine = reinterpret_cast<float*>(scratch + warp * scratch_stride);
#pragma unroll
  for (int i = 0; i < DIM / 16; i++) {
    float* row = mine + channel(i, 0) * ROW + 2 * j;
    *reinterpret_cast<float2*>(row) = make_float2(O[i][0] * f0, O[i][1] * f1);
    row = mine + channel(i, 1) * ROW + 2 * j;
    *reinterpret_cast<float2*>(row) = make_float2(O[i][2] * f0, O[i][3] * f1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < COLUMNS * DIM; i += NUM_WARPS * 32) {
    const int n = i / DIM, d = i % DIM;
    if (!(columns >> n & 1)) continue;
    float a = 0.f;
#pragma unroll
    for (int w = 0; w < NUM_WARPS; w++) a += reinterpret_cast<const float*>(scratch + w * scratch_stride)[d * ROW + n];
    part_o[((size_t)slot * COLUMNS + n) * DIM + d] = a;
  }
  if (threadIdx.x < COLUMNS) {
    float M = NO_SCORE, L = 0.f;
    for (int w = 0; w < NUM_WARPS; w++) M = fmaxf(M, sums[w][threadIdx.x].x);
    for (int w = 0; w < NUM_WARPS; w++) L += sums[w][threadIdx.x].y * exp2_fast(sums[w][threadIdx.x].x - M);
    part_ml[slot * COLUMNS + threadIdx.x] = make_float2(M, L);
  }
}

// Where an item's page masses go: the place of each column of the first page, or -1, and the places from one
// page to the next. A warp has its own.
struct MassPlaces {
  int column[COLUMNS];
  int step;
};
__device__ __forceinline__ void set_mass_places(MassPlaces& places, const int* columns, const Item& item, int num_heads,
                                                int group) {
  const int lane = threadIdx.x & 31;
  if (lane < COLUMNS) {
    const int c = columns[lane];
    places.column[lane] = c < 0 ? -1 : (item.entry + (c >> 8)) * num_heads + item.head * group + (c & 255);
    if (lane == 0) places.step = item.stride * num_heads;
  }
  __syncwarp();
}
// The sum of exp of an item's page for the two columns of each lane, a step at a time, so that other work lies between
// a shuffle and the use of what it brings: lanes of even g add up column 2j, those of odd g column 2j + 1.
struct PageSum {
  float sum, other;
  __device__ __forceinline__ void begin(float sum0, float sum1) {
    const bool odd = threadIdx.x & 4;
    sum = odd ? sum1 : sum0;
    other = __shfl_xor_sync(~0u, odd ? sum0 : sum1, 4);
  }
  __device__ __forceinline__ void step(int by) {
    sum += other;
    other = __shfl_xor_sync(~0u, sum, by);
  }
  // Writes its log2; `m0` and `m1` are the columns' references.
  __device__ __forceinline__ void write(float* mass, const MassPlaces& places, int page, float m0, float m1) const {
    const int lane = threadIdx.x & 31, odd = lane >> 2 & 1;
    const int column = lane < 8 ? places.column[2 * (lane & 3) + odd] : -1;
    const float value = log2_fast(sum + other) + (odd ? m1 : m0);
    if (column >= 0) mass[column + (size_t)page * places.step] = value;
  }
};
