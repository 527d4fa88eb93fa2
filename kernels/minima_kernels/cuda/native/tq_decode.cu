// Decode over TQ pages: split-KV attention of tiles of eight query columns, all products in integers.
//   score = (codes_K . q) * k_scale[token] + mean . q     m16n8k32 s8 x s8, q as one or two bytes
//   out  += P * codes_V                                    m16n8k32 s8 x u8, P = 256 * high + low
// A warp owns whole pages. Two bulk copies (K codes and scales, V codes and scales) fill its slot, one
// half is refetched while the other is used; codes become MMA operands in registers. The key means of
// eight pages at a time are the rows of one more product, with queries that lie in shared memory.
// Macros: HEAD_DIM, K_BITS, V_BITS, Q_BYTES, CENTRED, WARPS, MIN_BLOCKS, the tables K_T0.., V_T0..
// and the codebook steps K_STEP, V_STEP.
#include "common.cuh"
#include "unpack.cuh"

constexpr int K_CODES = PAGE * HEAD_DIM * K_BITS / 8, V_CODES = PAGE * HEAD_DIM * V_BITS / 8;
constexpr int SCALES = PAGE * 2, MEAN = CENTRED ? 2 * HEAD_DIM : 0;
constexpr int K_BYTES = K_CODES + SCALES, V_BYTES = V_CODES + SCALES;
constexpr int HEAD_BYTES = K_BYTES + MEAN + V_BYTES;  // of one KV head in a page
constexpr int ROOM = K_BYTES + V_BYTES > HEAD_DIM * 40 ? K_BYTES + V_BYTES : HEAD_DIM * 40;
constexpr int SLOT = (ROOM + 127) / 128 * 128;
constexpr int MEAN_PAGES = 8, MEAN_ROW = 2 * HEAD_DIM + 16;  // rows padded against bank conflicts
constexpr int MEAN_SLOT = CENTRED ? (MEAN_PAGES * MEAN_ROW + 127) / 128 * 128 : 0;
constexpr int QUERIES = CENTRED ? HEAD_DIM * COLUMNS * 4 : 0;  // of a tile, as sums of two 16-bit floats
constexpr int QUERIES_AT = WARPS * (SLOT + MEAN_SLOT), SHARED = QUERIES_AT + QUERIES;
constexpr int K_STEPS = HEAD_DIM / 32, V_TILES = HEAD_DIM / 16, BUNDLES = HEAD_DIM / 64;
constexpr float Q_MAX = Q_BYTES == 2 ? 16256.f : 127.f;
// Integer sums start here, so that their bits are floats: 1.5 * 2^23 plus the sum.
constexpr int MAGIC_BITS = 0x4B400000;
constexpr float MAGIC = 12582912.f;

// The words of four groups of 32 codes of this lane.
template <int BITS>
__device__ __forceinline__ void load_bundle(uint32_t codes, int bundle, uint32_t* w) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int u = 0; u < BITS; u++) {
    const uint4 v = load_shared16(codes + ((bundle * BITS + u) * 32 + lane) * 16);
    w[u * 4] = v.x, w[u * 4 + 1] = v.y, w[u * 4 + 2] = v.z, w[u * 4 + 3] = v.w;
  }
}

// Scores of a page, before the query's scale: s[t] of tokens 16t + g (0, 1) and 16t + 8 + g (2, 3).
__device__ __forceinline__ void scores(uint32_t keys, const uint32_t (*q)[2], const uint32_t (*q_low)[2],
                                       float (*s)[4], uint32_t t0) {
  const int g = (threadIdx.x & 31) >> 2;
  const uint4 stored = load_shared16(keys + K_CODES + g * 16);
  const uint32_t scale[4] = {stored.x, stored.y, stored.z, stored.w};
  int high[4], low[4];
#pragma unroll
  for (int bundle = 0; bundle < BUNDLES; bundle++) {
    uint32_t w[4 * K_BITS];
    load_bundle<K_BITS>(keys, bundle, w);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int group = bundle * 4 + i, t = group / BUNDLES, k = group % BUNDLES * 2;
      if (k == 0) {
        high[0] = high[1] = high[2] = high[3] = 0;
        low[0] = low[1] = low[2] = low[3] = 0;
      }
      uint32_t r[16];
      unpack<K_BITS, KTable>(w + i * K_BITS, r, t0);
#pragma unroll
      for (int set = 0; set < (K_BITS == 4 ? 2 : 1); set++) {
        mma_ss(high, r + 8 * set, q[k]);
        mma_ss(high, r + 8 * set + 4, q[k + 1]);
        if (Q_BYTES == 2) {
          mma_ss(low, r + 8 * set, q_low[k]);
          mma_ss(low, r + 8 * set + 4, q_low[k + 1]);
        }
      }
      if (k == K_STEPS - 2) {
        const float2 f = unpack_half2(scale[t]);
#pragma unroll
        for (int c = 0; c < 4; c++)
          s[t][c] = (float)(Q_BYTES == 2 ? high[c] * 128 + low[c] : high[c]) * (c & 2 ? f.y : f.x);
      }
    }
  }
}

// Dot products of up to eight key means with columns 2j and 2j + 1: those of page g.
__device__ __forceinline__ float2 mean_scores(uint32_t means, uint32_t queries) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  float c[4] = {0.f, 0.f, 0.f, 0.f}, low[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 2 * BUNDLES; i++) {
    const uint4 a = load_shared16(means + g * MEAN_ROW + (i / 2 * 64 + j * 16 + i % 2 * 8) * 2);
    const uint4 x = load_shared16(queries + (2 * i * 32 + lane) * 16);
    const uint4 y = load_shared16(queries + ((2 * i + 1) * 32 + lane) * 16);
    mma_f16(c, a.x, 0, a.y, 0, x.x, x.y);
    mma_f16(low, a.x, 0, a.y, 0, x.z, x.w);
    mma_f16(c, a.z, 0, a.w, 0, y.x, y.y);
    mma_f16(low, a.z, 0, a.w, 0, y.z, y.w);
  }
  return make_float2(c[0] + low[0], c[1] + low[1]);
}

template <bool MASS>
__device__ __forceinline__ void decode(const uint8_t* __restrict__ share, const int* __restrict__ pages,
                                       const uint2* __restrict__ q_bytes, int q_plane,
                                       const uint4* __restrict__ q_halves, const float* __restrict__ q_scale,
                                       const int* __restrict__ tile_columns, const int* __restrict__ item_start,
                                       const uint4* __restrict__ items, float* __restrict__ part_o,
                                       float2* __restrict__ part_ml, float* __restrict__ mass, int num_heads,
                                       int group, int num_kv_heads, int chained) {
  DYNAMIC_SHARED(128, memory);
  __shared__ __align__(8) uint64_t barriers[WARPS * 3 + 1];
  // Queries times the key means of eight pages, and after the last page a warp's sums.
  __shared__ float2 dots[WARPS][CENTRED ? MEAN_PAGES * COLUMNS / 2 : COLUMNS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const uint32_t keys = shared_address(memory) + warp * SLOT, values = keys + K_BYTES;
  const uint32_t means = shared_address(memory) + WARPS * SLOT + warp * MEAN_SLOT;
  const uint32_t key_barrier = shared_address(&barriers[warp * 3]);
  const uint32_t value_barrier = key_barrier + 8, mean_barrier = key_barrier + 16;
  const uint32_t queries = shared_address(memory) + QUERIES_AT, query_barrier = shared_address(&barriers[WARPS * 3]);
  if (CENTRED && threadIdx.x == 0) barrier_init(query_barrier, 1);
  if (lane == 0) {
    barrier_init(key_barrier, 1);
    barrier_init(value_barrier, 1);
    barrier_init(mean_barrier, 1);
    publish_barriers();
  }
  __syncthreads();
  __shared__ uint32_t entries[WARPS][2];
  __shared__ MassPlaces places[MASS ? WARPS : 1];
  __shared__ Held held[WARPS];
  const uint32_t k_t0 = hold(K_T0, &entries[warp][0]);
  const uint32_t v_t0 = K_T0 == V_T0 ? k_t0 : hold(V_T0, &entries[warp][1]);
  uint32_t phase = 0, mean_phase = 0;
  const int start = item_start[blockIdx.x], stop = item_start[blockIdx.x + 1];
  for (int index = start; index < stop; index++) {
    const Item item = load_item(items, index);
    const uint8_t* head = share + (size_t)item.head * HEAD_BYTES;
    int page = item.first + warp;
    const int count = page < item.last ? (item.last - page + WARPS - 1) / WARPS : 0;
    auto fetch_means = [&](int done) {  // of the next pages of this warp after `done`
      const int n = min(count - done, MEAN_PAGES);
      if (n <= 0) return;
      if (lane == 0) barrier_expect(mean_barrier, n * MEAN);
      __syncwarp();
      if (lane < n) {
        const int at = pages[item.first + warp + (done + lane) * WARPS];
        bulk_copy(means + lane * MEAN_ROW, head + (size_t)at * GRANULE + K_BYTES, MEAN, mean_barrier);
      }
    };
    if (lane == 0 && count > 0) {
      const uint8_t* source = head + (size_t)pages[page] * GRANULE;
      barrier_expect(key_barrier, K_BYTES);
      bulk_copy(keys, source, K_BYTES, key_barrier);
      barrier_expect(value_barrier, V_BYTES);
      bulk_copy(values, source + K_BYTES + MEAN, V_BYTES, value_barrier);
    }
    if (CENTRED) fetch_means(0);
    // What was fetched above does not depend on the kernel that makes the query fragments. Kernels
    // that follow another one of the same run start after that kernel has passed this point.
    if (index == start) {
      if (!chained) depend_wait();
      depend_go();
    }
    if (CENTRED && threadIdx.x == 0) {
      barrier_expect(query_barrier, QUERIES);
      bulk_copy(queries, q_halves + (size_t)item.tile * V_TILES * 32, QUERIES, query_barrier);
    }
    uint32_t q[K_STEPS][2], q_low[K_STEPS][2];
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
      const uint2 v = q_bytes[((size_t)item.tile * K_STEPS + k) * 32 + lane];
      q[k][0] = v.x, q[k][1] = v.y;
      if (Q_BYTES == 2) {
        const uint2 u = q_bytes[((size_t)(q_plane + item.tile) * K_STEPS + k) * 32 + lane];
        q_low[k][0] = u.x, q_low[k][1] = u.y;
      }
    }
    const float2 unit = *reinterpret_cast<const float2*>(q_scale + item.tile * COLUMNS + 2 * j);
    const float2 scale = make_float2(unit.x * (K_STEP / Q_MAX), unit.y * (K_STEP / Q_MAX));
    const int* columns = tile_columns + item.tile / num_kv_heads * COLUMNS;
    hold_item(held[warp], item, columns);
    if (MASS) set_mass_places(places[warp], columns, item, num_heads, group);
    float O[V_TILES][4];
#pragma unroll
    for (int i = 0; i < V_TILES; i++) O[i][0] = O[i][1] = O[i][2] = O[i][3] = 0.f;
    Running run;
    for (int done = 0; done < count; done++, page += WARPS) {
      const int next = lane == 0 && done + 1 < count ? pages[page + WARPS] : -1;
      float shift0 = 0.f, shift1 = 0.f;
      if (CENTRED) {
        if (done % MEAN_PAGES == 0) {
          if (done == 0) barrier_wait(query_barrier, (index - start) & 1);
          barrier_wait(mean_barrier, mean_phase);
          const float2 dot = mean_scores(means, queries);
          mean_phase ^= 1;
          dots[warp][g * 4 + j] = make_float2(dot.x * scale.x * (Q_MAX / K_STEP), dot.y * scale.y * (Q_MAX / K_STEP));
          __syncwarp();
          fetch_means(done + MEAN_PAGES);
        }
        const float2 dot = dots[warp][done % MEAN_PAGES * 4 + j];
        shift0 = dot.x, shift1 = dot.y;
      }
      barrier_wait(key_barrier, phase);
      float s[4][4];
      scores(keys, q, q_low, s, k_t0);
      __syncwarp();
      if (next >= 0) {
        barrier_expect(key_barrier, K_BYTES);
        bulk_copy(keys, head + (size_t)next * GRANULE, K_BYTES, key_barrier);
      }
      if (item.last_len < PAGE && page == item.last - 1) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
          if (16 * t + g >= item.last_len) s[t][0] = s[t][1] = -INFINITY;
          if (16 * t + 8 + g >= item.last_len) s[t][2] = s[t][3] = -INFINITY;
        }
      }
      barrier_wait(value_barrier, phase);
      const uint4 stored = load_shared16(values + V_CODES + g * 16);
      const uint32_t v_scale[4] = {stored.x, stored.y, stored.z, stored.w};
      uint32_t high[4], low[4];
      float sum0, sum1;
      // Weights with the V scale folded in are 16-bit integers above 2^23. Their reference moves only
      // when one would pass 2^16; a second pass then always fits.
      for (bool moved = false;; moved = true) {
        uint32_t all = 0, bits[4][4];
        sum0 = sum1 = 0.f;
#pragma unroll
        for (int t = 0; t < 4; t++) {
          const float2 v = unpack_half2(v_scale[t]);
#pragma unroll
          for (int c = 0; c < 4; c++) {
            const float e = exp2_fast(fmaf(s[t][c], c & 1 ? scale.y : scale.x, c & 1 ? shift1 - run.m1 : shift0 - run.m0));
            if (c & 1) sum1 += e; else sum0 += e;
            bits[t][c] = __float_as_uint(fmaf(e, c & 2 ? v.y : v.x, 8388608.f));
          }
          all |= bits[t][0] | bits[t][1];
          all |= bits[t][2] | bits[t][3];
        }
        const bool fits = (all & ~0x4B00FFFFu) == 0 && fmaxf(sum0, sum1) < 1e30f;
        if (moved || __all_sync(~0u, fits)) {
#pragma unroll
          for (int t = 0; t < 4; t++) {
            const uint32_t a = transpose8x8(prmt(bits[t][0], bits[t][1], 0x5410));
            const uint32_t b = transpose8x8(prmt(bits[t][2], bits[t][3], 0x5410));
            high[t] = prmt(a, b, 0x7531);
            low[t] = prmt(a, b, 0x6420);
          }
          break;
        }
        float x0 = NO_SCORE, x1 = NO_SCORE;
#pragma unroll
        for (int t = 0; t < 4; t++) {
          const float2 v = unpack_half2(v_scale[t]);
          // Rows of zeros have scale zero: they must not send the reference to minus infinity.
          const float a = log2_fast(fmaxf(v.x, 5.9604645e-8f)), b = log2_fast(fmaxf(v.y, 5.9604645e-8f));
          x0 = fmaxf(x0, fmaxf(fmaf(s[t][0], scale.x, a), fmaf(s[t][2], scale.x, b)));
          x1 = fmaxf(x1, fmaxf(fmaf(s[t][1], scale.y, a), fmaf(s[t][3], scale.y, b)));
        }
        const float m0 = fmaxf(run.m0, max_rows(x0) + shift0 - 14.f), m1 = fmaxf(run.m1, max_rows(x1) + shift1 - 14.f);
        const float f0 = exp2_fast(run.m0 - m0), f1 = exp2_fast(run.m1 - m1);
        run.m0 = m0, run.m1 = m1;
        run.l0 *= f0, run.l1 *= f1;
#pragma unroll
        for (int i = 0; i < V_TILES; i++) O[i][0] *= f0, O[i][1] *= f1, O[i][2] *= f0, O[i][3] *= f1;
      }
      run.l0 += sum0;
      run.l1 += sum1;
      PageSum page_sum;
      if (MASS) page_sum.begin(sum0, sum1);
#pragma unroll
      for (int bundle = 0; bundle < BUNDLES; bundle++) {
        uint32_t w[4 * V_BITS];
        load_bundle<V_BITS>(values, bundle, w);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          uint32_t r[16];
          unpack<V_BITS, VTable>(w + i * V_BITS, r, v_t0);
          const int tile = bundle * 4 + i;
          int a[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
          int b[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll
          for (int set = 0; set < (V_BITS == 4 ? 2 : 1); set++) {
            mma_su(a, r + 8 * set, high[0], high[1]);
            mma_su(a, r + 8 * set + 4, high[2], high[3]);
            mma_su(b, r + 8 * set, low[0], low[1]);
            mma_su(b, r + 8 * set + 4, low[2], low[3]);
          }
#pragma unroll
          for (int c = 0; c < 4; c++)
            O[tile][c] += fmaf(__int_as_float(a[c]) - MAGIC, 256.f, __int_as_float(b[c]) - MAGIC);
          if (MASS && tile == 0) page_sum.step(8);
          if (MASS && tile == 1) page_sum.step(16);
          if (MASS && tile == 2) page_sum.write(mass, places[warp], warp + done * WARPS, run.m0, run.m1);
        }
      }
      __syncwarp();
      if (next >= 0) {
        barrier_expect(value_barrier, V_BYTES);
        bulk_copy(values, head + (size_t)next * GRANULE + K_BYTES + MEAN, V_BYTES, value_barrier);
      }
      phase ^= 1;
    }
    write_partial<HEAD_DIM, WARPS>(O, run, V_STEP, memory, SLOT, dots, held[warp], part_o, part_ml,
                                   [&](int i, int half) { return i * 16 + half * 8 + g; });
    // The slots were written by ordinary stores; the next bulk copies go through another proxy.
    publish_shared();
    __syncthreads();
  }
  if (start == stop) {
    if (!chained) depend_wait();
    depend_go();
  }
  if (chained) depend_wait();
}

#define KERNEL(NAME, MASS)                                                                                          \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)                                              \
      NAME(const uint8_t* share, const int* pages, const uint2* q_bytes, int q_plane, const uint4* q_halves,        \
           const float* q_scale, const int* tile_columns, const int* item_start, const uint4* items, float* part_o,  \
           float2* part_ml, float* mass, int num_heads, int group, int num_kv_heads, int chained) {                 \
    decode<MASS>(share, pages, q_bytes, q_plane, q_halves, q_scale, tile_columns, item_start, items, part_o, part_ml, \
                 mass, num_heads, group, num_kv_heads, chained);                                                    \
  }
KERNEL(tq_decode, false)
KERNEL(tq_decode_mass, true)
extern "C" __device__ const int shared_bytes = SHARED;
