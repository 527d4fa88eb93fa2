// What all decode kernels share: instructions by name, the work list, the merge inside a block.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

constexpr int PAGE = 64;          // tokens of a page
constexpr int COLUMNS = 8;        // query columns (row, head) of a tile: the N of an MMA
constexpr int GRANULE = 128;      // unit of page addresses in bytes
constexpr float NO_SCORE = -1e30f;

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


__device__ __forceinline__ void depend_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void depend_go() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t s) {
  uint32_t d;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(s));
  return d;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
// Transposes 8x8 16-bit values held one row of a matrix per four lanes.
__device__ __forceinline__ uint32_t transpose8x8(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(d) : "r"(a));
  return d;
}
__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float2 unpack_half2(uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ uint4 load_shared16(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
__device__ __forceinline__ uint2 load_shared8(uint32_t a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
// Not to be hoisted out of a loop: that would cost more registers than the loads cost time.
__device__ __forceinline__ uint4 load_here(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Loaded anew where it is needed: kept over a page loop it would take registers.
__device__ __forceinline__ Item load_item(const uint4* items, int index) {
  const uint4 a = load_here(items + 2 * index), b = load_here(items + 2 * index + 1);
  return {(int)a.x, (int)a.y, (int)a.z, (int)a.w, (int)b.x, (int)b.y, (int)b.z, (int)b.w};
}
__device__ __forceinline__ void barrier_init(uint32_t a, uint32_t n) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(a), "r"(n));
}
__device__ __forceinline__ void barrier_wait(uint32_t a, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared.b64 p,[%0],%1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(a),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_copy(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void mma_f16(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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

// Merges the warps of a block and writes the partial of an item. `channel(i, half)` is the channel of
// accumulators O[i][0..1] (half 0) and O[i][2..3] (half 1) of this lane; `scratch` takes
// NUM_WARPS rows of `scratch_stride` bytes, at least DIM * 40 each. `columns[n]` of the tile: offset
// of the row among its page entries << 8 | head within the group, or -1.
template <int DIM, int NUM_WARPS, typename Channel>
__device__ __forceinline__ void write_partial(float (*O)[4], Running run, float factor, uint8_t* scratch,
                                              int scratch_stride, float2 (*sums)[COLUMNS], const int* columns,
                                              int slot, float* part_o, float2* part_ml, Channel channel) {
  constexpr int ROW = COLUMNS + 2;  // padded against bank conflicts
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
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
    if (columns[n] < 0) continue;
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
  alignas(8) int column[COLUMNS];
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
// Writes log2 of the sum of exp of an item's page for the two columns of each lane (lanes g = 0 write).
__device__ __forceinline__ void write_mass(float* mass, const MassPlaces& places, int page, float sum0, float sum1,
                                           float m0, float m1) {
  const int lane = threadIdx.x & 31;
  sum0 = sum_rows(sum0);
  sum1 = sum_rows(sum1);
  if (lane >= 4) return;
  const int2 column = *reinterpret_cast<const int2*>(&places.column[2 * lane]);
  const size_t offset = (size_t)page * places.step;
  if (column.x >= 0) mass[offset + column.x] = log2_fast(sum0) + m0;
  if (column.y >= 0) mass[offset + column.y] = log2_fast(sum1) + m1;
}
