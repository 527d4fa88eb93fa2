// Decode over TQ pages that many rows read: every page is read and unpacked once for up to 128 stacked rows
// (reader x query head of the group), 64 to a block of rows.
//   score = (codes_K . q) * k_scale[token] + mean . q     wgmma s8, q as one or two bytes
//   out  += P * codes_V                                    wgmma f16, P = weight * V scale, float sums
// Warpgroups 0 and 1 unpack K to bytes and V to 16-bit floats in shared memory; a packed register of a warp is
// one core matrix, so the stores have no bank conflicts. The one of V also makes a tile of 15-bit integers of
// eight key means at a time. Warpgroups 2 and 3 own a block of rows each, or alternate pages of the only block.
// Macros: HEAD_DIM, K_BITS, V_BITS, Q_BYTES, CENTRED, K_STAGES, V_STAGES, ROW_REGISTERS, K_REGISTERS, V_REGISTERS, the
// tables of unpack.cuh and the codebook steps K_STEP, V_STEP.
#include <stddef.h>

#include "cohort.cuh"
#include "unpack.cuh"
#include "wgmma.cuh"

constexpr int K_CODES = PAGE * HEAD_DIM * K_BITS / 8, V_CODES = PAGE * HEAD_DIM * V_BITS / 8;
constexpr int SCALES = PAGE * 2, MEAN = CENTRED ? 2 * HEAD_DIM : 0;
constexpr int K_BYTES = K_CODES + SCALES, HEAD_BYTES = K_BYTES + MEAN + V_CODES + SCALES;
constexpr int MEAN_PAGES = 8;
constexpr int AHEAD = 6;  // pages on their way to the cache before they are loaded
constexpr int K_STEPS = HEAD_DIM / 32, GROUPS = HEAD_DIM / 64;
// Whether registers allow the next page's scores while those of a page become weights.
constexpr bool EARLY = HEAD_DIM <= 128;
// Bytes from one core matrix to the next along K.
constexpr int K_STRIDE = 1024, V_STRIDE = HEAD_DIM * 16, MEAN_STRIDE = 256;
constexpr int K_TILE = PAGE * HEAD_DIM, V_TILE = 2 * PAGE * HEAD_DIM, Q_TILE = ROWS * HEAD_DIM;
constexpr int MEAN_TILE = 2 * MEAN_PAGES * HEAD_DIM;
// The high bytes of the queries stay in registers where there is room for them.
constexpr bool HIGH_SHARED = HEAD_DIM == 256, LOW_SHARED = CENTRED || Q_BYTES == 2;
constexpr int Q_TILES = HIGH_SHARED + LOW_SHARED;
constexpr int SHARED =
    K_STAGES * K_TILE + V_STAGES * V_TILE + CONSUMERS * Q_TILES * Q_TILE + (CENTRED ? 2 * MEAN_TILE : 0);
constexpr int MAGIC_BITS = 0x4B400000;                     // integer sums start here: their bits are floats
constexpr float MAGIC = 12582912.f, Q_MAX = 16256.f;

// Sets of scales: a tile is given back before the scales beside it are used, one or two pages later.
constexpr int SCALE_SETS = 2 * K_STAGES;

struct Shared {
  uint64_t k_full[K_STAGES], k_empty[K_STAGES], v_full[V_STAGES], v_empty[V_STAGES], mean_full[2], mean_empty[2];
  alignas(16) float scales[SCALE_SETS][2][SCALE_SET];  // of K and V
  float v_unit[SCALE_SETS], running_unit;
  alignas(16) float mean_step[2][MEAN_PAGES];
  alignas(16) uint32_t waiting[4][HEAD_DIM / 2];  // key means as they come
  float dots[CONSUMERS][ROWS][MEAN_PAGES];  // queries times key means
};

// What accesses of several words and descriptors take for granted. An odd number of floats in front of
// `mean_step` is a misaligned address at run time, and in some geometries only.
static_assert(offsetof(Shared, k_full) % 8 == 0 && alignof(Shared) >= 16, "barriers");
static_assert(offsetof(Shared, scales) % 16 == 0, "load_floats");
static_assert(offsetof(Shared, mean_step) % 8 == 0 && MEAN_PAGES % 2 == 0, "float2 of mean_scores");
static_assert(offsetof(Shared, waiting) % 16 == 0 && HEAD_DIM / 16 % 4 == 0, "fetch_mean");
static_assert(K_TILE % 128 == 0 && V_TILE % 128 == 0 && Q_TILE % 128 == 0 && MEAN_TILE % 128 == 0, "core matrices");
static_assert(K_STRIDE % 16 == 0 && V_STRIDE % 16 == 0 && MEAN_STRIDE % 16 == 0, "descriptors");
static_assert(K_CODES % 16 == 0 && K_BYTES % 16 == 0 && MEAN % 16 == 0 && V_CODES % 16 == 0 && HEAD_BYTES % 16 == 0,
              "parts of a head's share of a page");
static_assert(SHARED + (sizeof(Shared) + 1023) / 1024 * 1024 <= 227 * 1024, "shared memory of a block");
// Within an item a consumer passes by one page of the other one's at a time.
static_assert(K_STAGES >= 3 && V_STAGES >= 3 && SCALE_SETS >= K_STAGES + 2, "rounds of a ring");

// The words of this warp's groups of 32 codes per lane, as many at once as lie side by side.
template <int BITS>
struct Words {
  static constexpr int COUNT = GROUPS * BITS, WIDTH = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
  static_assert(4 % WIDTH == 0 && GROUPS % 4 * BITS % WIDTH == 0, "a warp's words start at multiples of the width");

  static __device__ __forceinline__ void load(const uint8_t* codes, int warp, int lane, uint32_t* x) {
    const int group = warp * GROUPS;
    const uint8_t* bundle = codes + group / 4 * (BITS * 512) + lane * 16;
#pragma unroll
    for (int u = 0; u < COUNT; u += WIDTH) {
      const int word = group % 4 * BITS + u;
      const uint8_t* p = bundle + (word >> 2) * 512 + (word & 3) * 4;
      load_words<WIDTH>(p, x + u);
    }
  }
};

// Where this lane's row of four core matrices lies: two and two, `stride` bytes apart.
__device__ __forceinline__ uint32_t matrix_row(int lane, uint32_t stride) {
  return (lane >> 4) * stride + (lane >> 3 & 1) * 128 + (lane & 7) * 16;
}

// Bytes of K: register r of a group is the core matrix of eight tokens and 16 channels.
__device__ __forceinline__ void put_keys(uint32_t tile, int warp, int lane, const uint32_t* x) {
  const uint32_t to = tile + matrix_row(lane, K_STRIDE) + warp * 256;
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    uint32_t r[8];
    unpack_bytes<K_BITS, KTable>(x + group * K_BITS, r);
#pragma unroll
    for (int i = 0; i < 8; i += 4) store_matrices(to + (4 * group + i / 2) * K_STRIDE, r[i], r[i + 1], r[i + 2], r[i + 3]);
  }
}

// 16-bit floats of V: the values plus 128 are bytes, and 0x64 above a byte is 1024 plus that byte.
__device__ __forceinline__ void put_values(uint32_t tile, int warp, int lane, const uint32_t* x) {
  const __half2 offset = __half2half2(__ushort_as_half(0x6480));
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const uint32_t to = tile + matrix_row(lane, V_STRIDE) + (warp * GROUPS + group) * 256;
    uint32_t r[8];
    unpack_bytes<V_BITS, VTable>(x + group * V_BITS, r);
    auto half = [&](uint32_t bytes, uint32_t pick) {
      const uint32_t pair = prmt(V_BITS == 4 ? bytes ^ 0x80808080u : bytes, 0x64646464u, pick);
      const __half2 value = __hsub2(*reinterpret_cast<const __half2*>(&pair), offset);
      return *reinterpret_cast<const uint32_t*>(&value);
    };
#pragma unroll
    for (int i = 0; i < 8; i += 2)
      store_matrices(to + i * V_STRIDE, half(r[i], 0x4140), half(r[i + 1], 0x4140), half(r[i], 0x4342),
                     half(r[i + 1], 0x4342));
  }
}

// One key mean as two rows of bytes, 128 * high + low = 16256 at its largest channel. It waits in shared memory,
// each lane's channels in a place of its own, so it takes no registers meanwhile.
__device__ __forceinline__ void fetch_mean(uint32_t waiting, const uint8_t* mean, int lane) {
  constexpr int OWN = HEAD_DIM / 16;  // bytes of a lane
  copy_async<OWN>(waiting + lane * OWN, mean + lane * OWN);
}
__device__ __forceinline__ void put_mean(const uint32_t* waiting, uint8_t* tile, float* step, int place, int lane) {
  constexpr int OWN = HEAD_DIM / 64;  // pairs of channels of a lane
  copy_async_wait();
  float largest = 1e-20f;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const float2 f = unpack_half2(waiting[lane * OWN + i]);
    largest = fmaxf(largest, fmaxf(fabsf(f.x), fabsf(f.y)));
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
  const float factor = __fdividef(Q_MAX, largest);
  uint8_t* to = tile + (lane * 2 * OWN >> 4) * MEAN_STRIDE + place * 16 + (lane * 2 * OWN & 15);
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const float2 f = unpack_half2(waiting[lane * OWN + i]);
    const int x = __float2int_rn(f.x * factor), y = __float2int_rn(f.y * factor);
    const int a = (x + 64) >> 7, b = (y + 64) >> 7;
    *reinterpret_cast<uint16_t*>(to + 2 * i) = (uint16_t)((a & 255) | (b & 255) << 8);
    *reinterpret_cast<uint16_t*>(to + 2 * i + 128) = (uint16_t)(((x - a * 128) & 255) | ((y - b * 128) & 255) << 8);
  }
  if (lane == 0) step[place] = largest * (1.f / (Q_MAX * K_STEP));
}

__device__ __forceinline__ void feed_keys(const uint8_t* share, const int* pages, const int* item_start,
                                          const uint4* items, Shared& shared, uint32_t tiles, int warp, int lane) {
  const uint32_t full = shared_address(shared.k_full), empty = shared_address(shared.k_empty);
  Ring<K_STAGES> ring;
  Ring<SCALE_SETS> sets;
  for (int index = load_int(item_start + blockIdx.x); index < load_int(item_start + blockIdx.x + 1); index++) {
    const Cohort item = load_cohort(items, index);
    const uint8_t* head = share + (size_t)item.head * HEAD_BYTES;
    auto source = [&](int page) { return head + (size_t)page * GRANULE; };
    const int count = item.last - item.first;
    const int* list = pages + item.first;
    uint32_t x[GROUPS * K_BITS], scale = 0;
    int ids = list[min(lane, count - 1)];
    // Of K for warp 0, of V for warp 1.
    const int scales_at = warp == 0 ? K_CODES : K_BYTES + MEAN + V_CODES;
    if (warp == 3)
#pragma unroll 1
      for (int p = 0; p < AHEAD; p++) {
        const uint8_t* at = source(__shfl_sync(~0u, ids, p));
        if (lane == 0) prefetch<HEAD_BYTES>(at);
      }
    const uint8_t* start = source(__shfl_sync(~0u, ids, 0));
    Words<K_BITS>::load(start, warp, lane, x);
    if (warp < 2) scale = load_word(start + scales_at + lane * 4);
    // The unit of V scales is a power of two, raised when a page's largest would pass HEADROOM units.
    if (warp == 1) shared.running_unit = 0.f;
    for (int p = 0; p < count; p++) {
      if ((p + 1) % 32 == 0) ids = list[min(p + 1 + lane, count - 1)];
      const uint8_t* next = source(__shfl_sync(~0u, ids, (p + 1) % 32));
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      const int later = list[min(p + AHEAD, count - 1)];
      put_keys(tiles + ring.stage * K_TILE, warp, lane, x);
      // Now, not behind the scales: the next page takes longer than what is left of this one.
      Words<K_BITS>::load(next, warp, lane, x);
      if (warp == 3 && lane == 0) prefetch<HEAD_BYTES>(source(later));
      if (warp < 2) {
        float2 f = unpack_half2(scale);
        scale = load_word(next + scales_at + lane * 4);
        if (warp == 0 && Q_BYTES == 1) f.x *= 128.f, f.y *= 128.f;
        if (warp == 1) use_unit(f, &shared.running_unit, &shared.v_unit[sets.stage], lane);
        // Tokens 16 t + 8 h + g with lane = 4 g + t: a consumer reads those of its columns at once.
        float* to = &shared.scales[sets.stage][warp][(lane >> 3) * SCALE_ROW + (lane & 3) * 4 + (lane >> 2 & 1)];
        to[0] = f.x, to[2] = f.y;
      }
      publish_shared();
      __syncwarp();
      if (lane == 0) arrive(full + 8 * ring.stage, 1);
      ring.advance(1);
      sets.advance(1);
    }
  }
}

__device__ __forceinline__ void feed_values(const uint8_t* share, const int* pages, const int* item_start,
                                            const uint4* items, Shared& shared, uint32_t tiles, uint8_t* mean_tiles,
                                            int warp, int lane) {
  const uint32_t full = shared_address(shared.v_full), empty = shared_address(shared.v_empty);
  Ring<V_STAGES> ring;
  Ring<2> means;
  for (int index = load_int(item_start + blockIdx.x); index < load_int(item_start + blockIdx.x + 1); index++) {
    const Cohort item = load_cohort(items, index);
    const uint8_t* head = share + (size_t)item.head * HEAD_BYTES + K_BYTES + MEAN;
    const int count = item.last - item.first;
    const int* list = pages + item.first;
    // A mean of this warp: of eight pages it has two, four apart.
    auto fetch = [&](int page) {
      fetch_mean(shared_address(shared.waiting[warp]), head - MEAN + (size_t)list[min(page + warp, count - 1)] * GRANULE,
                 lane);
    };
    auto put = [&](int place) {
      put_mean(shared.waiting[warp], mean_tiles + means.stage * MEAN_TILE, shared.mean_step[means.stage],
               place + warp, lane);
      if (place == 0) return;
      publish_shared();
      __syncwarp();
      if (lane == 0) arrive(shared_address(&shared.mean_full[means.stage]), 1);
      means.advance(1);
    };
    uint32_t x[GROUPS * V_BITS];
    int ids = list[min(lane, count - 1)];
    Words<V_BITS>::load(head + (size_t)__shfl_sync(~0u, ids, 0) * GRANULE, warp, lane, x);
    if (CENTRED) {
      barrier_wait(shared_address(&shared.mean_empty[means.stage]), means.phase ^ 1);
#pragma unroll 1
      for (int place = 0; place < MEAN_PAGES; place += 4) {
        fetch(place);
        put(place);
      }
    }
    for (int p = 0; p < count; p++) {
      if ((p + 1) % 32 == 0) ids = list[min(p + 1 + lane, count - 1)];
      const uint8_t* next = head + (size_t)__shfl_sync(~0u, ids, (p + 1) % 32) * GRANULE;
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      put_values(tiles + ring.stage * V_TILE, warp, lane, x);
      Words<V_BITS>::load(next, warp, lane, x);
      publish_shared();
      __syncwarp();
      if (lane == 0) arrive(full + 8 * ring.stage, 1);
      ring.advance(1);
      if (CENTRED && (p | 7) + 1 < count) {  // the means of the next eight pages, a step at a time
        if ((p & 3) == 0) fetch((p | 7) + 1 + (p & 4));
        if ((p & 7) == 1) barrier_wait(shared_address(&shared.mean_empty[means.stage]), means.phase ^ 1);
        if ((p & 3) == 2) put(p & 4);
      }
    }
  }
}

// Operand A of the queries' bytes of one plane: rows g and g + 8 of a warp's 16.
__device__ __forceinline__ void load_queries(const uint2* q_bytes, int plane, int num_kv_heads, int head,
                                             const int* refs, int k, int lane, uint32_t* a) {
  uint2 v[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const size_t place = (size_t)plane + (refs[i] >> 3) * num_kv_heads + head;
    v[i] = refs[i] < 0 ? make_uint2(0, 0) : q_bytes[(place * K_STEPS + k) * 32 + (refs[i] & 7) * 4 + (lane & 3)];
  }
  a[0] = v[0].x, a[1] = v[1].x, a[2] = v[0].y, a[3] = v[1].y;
}

template <bool MASS>
__device__ __forceinline__ void decode(const uint8_t* __restrict__ share, const int* __restrict__ pages,
                                       const uint2* __restrict__ q_bytes, int q_plane,
                                       const float* __restrict__ q_scale, const int* __restrict__ rows,
                                       const int* __restrict__ item_start, const uint4* __restrict__ items,
                                       uint4* __restrict__ part_o, float2* __restrict__ part_ml,
                                       float* __restrict__ part_step, float* __restrict__ mass, int num_heads,
                                       int group, int num_kv_heads, int chained) {
  DYNAMIC_SHARED(1024, memory);
  __shared__ Shared shared;
  const int role = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
  const uint32_t k_tiles = shared_address(memory), v_tiles = k_tiles + K_STAGES * K_TILE;
  constexpr int Q_AT = K_STAGES * K_TILE + V_STAGES * V_TILE, MEAN_AT = Q_AT + CONSUMERS * Q_TILES * Q_TILE;
  if (threadIdx.x == 0) {
    for (int i = 0; i < K_STAGES; i++) {
      barrier_init(shared_address(&shared.k_full[i]), 4);
      barrier_init(shared_address(&shared.k_empty[i]), CONSUMERS * 4);
    }
    for (int i = 0; i < V_STAGES; i++) {
      barrier_init(shared_address(&shared.v_full[i]), 4);
      barrier_init(shared_address(&shared.v_empty[i]), CONSUMERS * 4);
    }
    for (int i = 0; i < 2; i++) {
      barrier_init(shared_address(&shared.mean_full[i]), 4);
      barrier_init(shared_address(&shared.mean_empty[i]), CONSUMERS * 4);
    }
    publish_barriers();
  }
  __syncthreads();
  if (role < 2) {
    if (role == 0) {
      give_registers<K_REGISTERS>();
      feed_keys(share, pages, item_start, items, shared, k_tiles, warp, lane);
    } else {
      give_registers<V_REGISTERS>();
      feed_values(share, pages, item_start, items, shared, v_tiles, memory + MEAN_AT, warp, lane);
    }
    return;
  }
  take_registers<ROW_REGISTERS>();
  const int me = role - 2, g = lane >> 2, j = lane & 3;
  const uint32_t k_full = shared_address(shared.k_full), k_empty = shared_address(shared.k_empty);
  const uint32_t v_full = shared_address(shared.v_full), v_empty = shared_address(shared.v_empty);
  const uint32_t scales = shared_address(shared.scales) + j * SCALE_ROW * 4;
  const uint32_t q_tile = k_tiles + Q_AT + me * Q_TILES * Q_TILE, low_tile = q_tile + HIGH_SHARED * Q_TILE;
  const uint64_t q_high = tile_descriptor(q_tile, K_STRIDE, 128), q_low = tile_descriptor(low_tile, K_STRIDE, 128);
  const uint64_t keys = tile_descriptor(k_tiles, K_STRIDE, 128), values = tile_descriptor(v_tiles, V_STRIDE, 128);
  const uint64_t means = tile_descriptor(k_tiles + MEAN_AT, MEAN_STRIDE, 128);
  // Pages are fetched, and work lists read, before the queries are there; see tq_decode.cu for the order of kernels.
  auto begin = [&] {
    if (!chained) depend_wait();
    depend_go();
  };
  if (load_int(item_start + blockIdx.x) == load_int(item_start + blockIdx.x + 1)) begin();
  int passed = 0;   // pages of items done
  Ring<2> mean_ring;
  for (int index = load_int(item_start + blockIdx.x); index < load_int(item_start + blockIdx.x + 1); index++) {
    // A parity tells a round of a ring only from the ones beside it. The only page of a single block is the first
    // consumer's: without the other one waiting here, a few of those and it takes an old tile for a new one. The
    // tile of queries is not read any more either.
    sync_threads<CONSUMERS * 128>(1 + CONSUMERS);
    const Cohort item = load_cohort(items, index);
    const int blocks = item.blocks & 255, block = me % blocks, step = 3 - blocks, count = item.last - item.first;
    const int* refs_at = rows + (item.rows + block) * ROWS + warp * 16 + g;
    const int refs[2] = {load_int(refs_at), load_int(refs_at + 8)};
    if (passed == 0) begin();
    uint32_t q[HIGH_SHARED ? 1 : K_STEPS][4];
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
      uint32_t a[4] = {};
      const uint32_t at = q_tile + k * 2 * K_STRIDE + warp * 256 + lane * 4;
      auto put = [&](uint32_t to) {
        store4(to, a[0]), store4(to + 128, a[1]), store4(to + K_STRIDE, a[2]), store4(to + K_STRIDE + 128, a[3]);
      };
      load_queries(q_bytes, 0, num_kv_heads, item.head, refs, k, lane, a);
      if constexpr (HIGH_SHARED) put(at);
      else q[k][0] = a[0], q[k][1] = a[1], q[k][2] = a[2], q[k][3] = a[3];
      if constexpr (LOW_SHARED) {
        load_queries(q_bytes, q_plane, num_kv_heads, item.head, refs, k, lane, a);
        put(at + HIGH_SHARED * Q_TILE);
      }
    }
    if constexpr (Q_TILES > 0) {
      publish_shared();
      sync_threads<128>(1 + me);
    }
    float scale[2];  // of a sum of 15-bit queries
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const size_t place = (size_t)(refs[i] >> 3) * num_kv_heads + item.head;
      scale[i] = refs[i] < 0 ? 0.f : q_scale[place * COLUMNS + (refs[i] & 7)] * (K_STEP / Q_MAX);
    }
    float O[HEAD_DIM / 2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) O[i] = 0.f;
    BlockRows run;
    int p = blocks == 2 ? 0 : me;
    Ring<K_STAGES> k_ring{(passed + p) % K_STAGES, (uint32_t)(passed + p) / K_STAGES & 1};
    Ring<SCALE_SETS> sets{(passed + p) % SCALE_SETS};
    Ring<V_STAGES> v_ring{(passed + p) % V_STAGES, (uint32_t)(passed + p) / V_STAGES & 1};
    passed += count;
    int S[32];
    // Scores of the page in this stage, of the high bytes and then of both; a page behind the last one gives some
    // that are not used.
    auto score_high = [&](int stage) {
      const uint64_t tile = keys + (uint64_t)(stage * K_TILE >> 4);
#pragma unroll
      for (int i = 0; i < 32 * (Q_BYTES == 1); i++) S[i] = MAGIC_BITS;
      wgmma_fence();
      if constexpr (HIGH_SHARED) wgmma_s8_n64<Q_BYTES == 1>(S, q_high, tile);
      else wgmma_s8_n64<Q_BYTES == 1>(S, q[0], tile);
#pragma unroll
      for (int k = 1; k < K_STEPS; k++) {
        const uint64_t along = (uint64_t)(k * 2 * K_STRIDE >> 4);
        if constexpr (HIGH_SHARED) wgmma_s8_n64(S, q_high + along, tile + along);
        else wgmma_s8_n64(S, q[k], tile + along);
      }
      wgmma_commit();
    };
    auto score_low = [&](int stage) {
      if constexpr (Q_BYTES == 2) {
        wgmma_wait<0>();
        const uint64_t tile = keys + (uint64_t)(stage * K_TILE >> 4);
#pragma unroll
        for (int i = 0; i < 32; i++) S[i] *= 128;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_STEPS; k++) {
          const uint64_t along = (uint64_t)(k * 2 * K_STRIDE >> 4);
          wgmma_s8_n64(S, q_low + along, tile + along);
        }
        wgmma_commit();
      }
    };
    // Queries times the key means of the next eight pages; waits for all products.
    auto mean_scores = [&]() {
      int sum[8], low[8];  // of the queries' high and low bytes
      __syncwarp();  // all lanes have read those before
      barrier_wait(shared_address(&shared.mean_full[0]) + 8 * mean_ring.stage, mean_ring.phase);
      const uint64_t tile = means + (uint64_t)(mean_ring.stage * MEAN_TILE >> 4);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < K_STEPS; k++) {
        const uint64_t along = (uint64_t)(k * 2 * K_STRIDE >> 4), rows_along = (uint64_t)(k * 2 * MEAN_STRIDE >> 4);
        if (k == 0) {
          if constexpr (HIGH_SHARED) wgmma_s8_n16<false>(sum, q_high, tile);
          else wgmma_s8_n16<false>(sum, q[0], tile);
          wgmma_s8_n16<false>(low, q_low, tile);
          continue;
        }
        if constexpr (HIGH_SHARED) wgmma_s8_n16(sum, q_high + along, tile + rows_along);
        else wgmma_s8_n16(sum, q[k], tile + rows_along);
        wgmma_s8_n16(low, q_low + along, tile + rows_along);
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] = sum[i] * 128 + low[i];
      const float2 size = *reinterpret_cast<const float2*>(&shared.mean_step[mean_ring.stage][2 * j]);
#pragma unroll
      for (int i = 0; i < 4; i++)
        shared.dots[me][warp * 16 + (i >> 1) * 8 + g][2 * j + (i & 1)] =
            fmaf((float)sum[i], 128.f, (float)sum[i + 4]) * (i & 1 ? size.y : size.x);
      __syncwarp();
      if (lane == 0) arrive(shared_address(&shared.mean_empty[0]) + 8 * mean_ring.stage, 1);
      mean_ring.advance(1);
    };
    // The page behind this one.
    auto expect_next = [&] {
      k_ring.advance(step);
      if (p + step >= count) return;
      if (CENTRED && (p + step) % MEAN_PAGES < step) mean_scores();
      barrier_wait(k_full + 8 * k_ring.stage, k_ring.phase);
    };
    // A tile of keys is given back once its scores are there.
    auto give_back = [&](int page) {
      if (lane == 0 && page < count) arrive(k_empty + 8 * k_ring.stage, step);
    };
    if (p < count) {
      if (CENTRED) mean_scores();
      barrier_wait(k_full + 8 * k_ring.stage, k_ring.phase);
    }
    score_high(k_ring.stage);
    score_low(k_ring.stage);
    wgmma_wait<0>();
    give_back(p);
    auto page_scales = [&](int which) { return scales + (sets.stage * 2 + which) * (SCALE_SET * 4); };
    float4 v_scales[4];
    int v_stage = -1;  // whose product runs
    for (; p < count; p += step) {
      float shift0 = -run.m0, shift1 = -run.m1;
      if constexpr (CENTRED) {
        const float* dots = &shared.dots[me][warp * 16 + g][p % MEAN_PAGES];
        shift0 = fmaf(dots[0], scale[0], shift0);
        shift1 = fmaf(dots[8 * MEAN_PAGES], scale[1], shift1);
      }
      const float page_unit = shared.v_unit[sets.stage];
      float s[32];
#pragma unroll
      for (int u = 0; u < 4; u++) {
        const float4 k_scale = load_floats(page_scales(0) + u * 16);
#pragma unroll
        for (int x = 0; x < 8; x++) {
          const float sum = Q_BYTES == 2 ? (float)S[u * 8 + x] : __int_as_float(S[u * 8 + x]) - MAGIC;
          const float t = sum * scale_of(k_scale, x);
          s[u * 8 + x] = fmaf(t, x & 2 ? scale[1] : scale[0], x & 2 ? shift1 : shift0);
        }
      }
      if constexpr (EARLY) {
        expect_next();
        score_high(k_ring.stage);  // runs under this page's softmax
        load_scales(page_scales(1), v_scales);
      }
      const Weighed now = weigh(run, s, page_unit);
      settle<32>(s);
      if constexpr (EARLY) {
        score_low(k_ring.stage);
        if constexpr (Q_BYTES == 1) wgmma_wait<0>();
        if (lane == 0 && v_stage >= 0) arrive(v_empty + 8 * v_stage, step);
        scale_weights(s, v_scales);
      } else {
        scale_weights(s, page_scales(1));
      }
      if (MASS)
        write_row_mass(mass, load_cohort(items, index), p, block, now.sum0, now.sum1, run, scale, num_heads, group, warp,
                       lane);
      if constexpr (!EARLY) {
        wgmma_wait<0>();
        if (lane == 0 && v_stage >= 0) arrive(v_empty + 8 * v_stage, step);
      }
      if (now.moves) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++)
          O[i * 4] *= now.f0, O[i * 4 + 1] *= now.f0, O[i * 4 + 2] *= now.f1, O[i * 4 + 3] *= now.f1;
      }
      uint32_t P[16];
#pragma unroll
      for (int i = 0; i < 16; i++) P[i] = pack_half2(s[2 * i], s[2 * i + 1]);
      sets.advance(step);
      if constexpr (!EARLY) {
        expect_next();
        score_high(k_ring.stage);
        score_low(k_ring.stage);
      }
      v_stage = v_ring.stage;
      barrier_wait(v_full + 8 * v_stage, v_ring.phase);
      v_ring.advance(step);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++)
        wgmma_f16<HEAD_DIM>(O, P + 4 * k, values + (uint64_t)((v_stage * V_TILE + k * 2 * V_STRIDE) >> 4));
      wgmma_commit();
      wgmma_wait<1>();  // the product with V runs under the next page's softmax
      give_back(p + step);
    }
    wgmma_wait<0>();
    settle<HEAD_DIM / 2>(O);
    if (lane == 0 && v_stage >= 0) arrive(v_empty + 8 * v_stage, step);
    if (CENTRED && step == 2 && me == 1 && count % MEAN_PAGES == 1) {  // the last means are one, not for these pages
      barrier_wait(shared_address(&shared.mean_full[0]) + 8 * mean_ring.stage, mean_ring.phase);
      if (lane == 0) arrive(shared_address(&shared.mean_empty[0]) + 8 * mean_ring.stage, 1);
      mean_ring.advance(1);
    }
    write_rows(O, run, item.slot + me, run.v_unit * V_STEP, part_o, part_ml, part_step, warp, lane);
  }
  if (chained) depend_wait();
}

#define KERNEL(NAME, MASS)                                                                                         \
  extern "C" __global__ void __launch_bounds__(512, 1)                                                             \
      NAME(const uint8_t* share, const int* pages, const uint2* q_bytes, int q_plane, const float* q_scale,        \
           const int* rows, const int* item_start, const uint4* items, uint4* part_o, float2* part_ml,             \
           float* part_step, float* mass, int num_heads, int group, int num_kv_heads, int chained) {               \
    decode<MASS>(share, pages, q_bytes, q_plane, q_scale, rows, item_start, items, part_o, part_ml, part_step,     \
                 mass, num_heads, group, num_kv_heads, chained);                                                   \
  }
KERNEL(cohort_decode, false)
KERNEL(cohort_decode_mass, true)
extern "C" __device__ const int shared_bytes = SHARED;
