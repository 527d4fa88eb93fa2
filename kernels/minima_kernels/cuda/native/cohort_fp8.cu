// Decode over FP8 pages that many rows read: every page is read and converted once for up to 128 stacked rows. The
// work is shared out as in cohort_decode.cu.
//   score = (codes_K . q) * k_scale[token]     wgmma f16, q as one 16-bit float
//   out  += P * codes_V                        wgmma f16, P = weight * V scale, float sums
// Warpgroups 0 and 1 bring K and V by asynchronous copies and make e4m3 16-bit floats, exactly; a few pages ahead
// of them pages are brought to the cache. The order of rows is kept: a core matrix is 8 tokens with 8 channels each,
// which K reads along the channels and V along the tokens. Warpgroups 2 and 3 own a block of rows each, or alternate
// pages of the only block.
// Macros: HEAD_DIM, K_STAGES, V_STAGES, ROW_REGISTERS, FEED_REGISTERS, HELD (pages that are copied ahead), EARLY
// (whether the next page's scores are made while those of a page become weights).
#include <stddef.h>

#include "cohort.cuh"
#include "wgmma.cuh"

constexpr int HEAD_CODES = PAGE * HEAD_DIM, HEAD_SCALES = PAGE * 2;
constexpr int K_STEPS = HEAD_DIM / 16;
constexpr int TOKEN_STRIDE = 128, CHANNEL_STRIDE = 1024;  // bytes from one core matrix to the next
constexpr int TILE = 2 * PAGE * HEAD_DIM, Q_TILE = 2 * ROWS * HEAD_DIM;
constexpr int ACROSS = HEAD_DIM / 64, PIECES = 2 * ACROSS;  // 64-byte runs of a row; 16-byte pieces of a lane and page
constexpr int PART = PIECES < 4 ? PIECES : 4, PARTS = PIECES / PART;  // of those, what is converted at once
constexpr int AHEAD = 1024 / HEAD_DIM;  // pages on their way to the cache before they are copied
constexpr bool Q_SHARED = HEAD_DIM == 256;  // no registers are left for the queries
// Sets of scales: a tile is given back before the scales beside it are used, one or two pages later.
constexpr int SCALE_SETS = K_STAGES + 2;
constexpr int RAW = HELD * HEAD_CODES;  // codes of one operand as they come
constexpr int SHARED = (K_STAGES + V_STAGES) * TILE + Q_SHARED * CONSUMERS * Q_TILE + 2 * RAW;

struct Shared {
  uint64_t k_full[K_STAGES], k_empty[K_STAGES], v_full[V_STAGES], v_empty[V_STAGES];
  alignas(16) float scales[SCALE_SETS][2][SCALE_SET];  // of K and V
  float v_unit[SCALE_SETS], running_unit;
  uint32_t raw_scales[HELD][2][32];
};

static_assert(offsetof(Shared, k_full) % 8 == 0 && alignof(Shared) >= 16, "barriers");
static_assert(offsetof(Shared, scales) % 16 == 0, "load_floats");
static_assert(AHEAD < 32, "pages that the lanes of a warp bring to the cache at once");
static_assert(SHARED + (sizeof(Shared) + 127) / 128 * 128 <= 227 * 1024, "shared memory of a block");
// Within an item a consumer passes by one page of the other one's at a time; see the barrier before an item.
static_assert(K_STAGES >= 2 && V_STAGES >= 2, "rounds of a ring");

// Tiles of one operand, page after page; the warpgroup of K brings the scales of both. `codes` is where the operand
// begins in a page, `k_scales` and `v_scales` where its scales do.
template <bool IS_K, int STAGES>
__device__ __forceinline__ void feed(const uint8_t* share, int codes, int k_scales, int v_scales, const int* pages,
                                     const int* item_start, const uint4* items, Shared& shared, uint32_t full,
                                     uint32_t empty, uint32_t tiles, uint32_t raw, int warp, int lane) {
  // Eight neighbouring lanes hold one piece of eight tokens: a core matrix, stored without bank conflicts.
  const int token = warp * 16 + (lane & 7), piece = lane >> 3;
  const int own = codes + token * HEAD_DIM + piece * 16;
  const uint32_t to = tiles + piece * 2 * CHANNEL_STRIDE + token * 16;
  const bool has_scales = IS_K && warp < 2;
  Ring<STAGES> ring;
  Ring<SCALE_SETS> sets;
  // Items from `index` on are to come; the last page loaded is at `place` of the list of pages.
  int index = load_int(item_start + blockIdx.x), place = 0, last = 0, head = 0;
  int held = 0, begins = 0;  // pages on their way; a bit for each that is the first of an item
  auto source = [&](int at) { return share + (size_t)load_int(pages + at) * GRANULE; };
  auto bring_to_cache = [&](int at, int of) {
    const uint8_t* page = source(at);
    prefetch<HEAD_CODES>(page + codes + of * HEAD_CODES);
    if (IS_K) prefetch<HEAD_SCALES>(page + k_scales + of * HEAD_SCALES);
    if (IS_K) prefetch<HEAD_SCALES>(page + v_scales + of * HEAD_SCALES);
  };
  // To the next page, which comes to place `n` of those held; false behind the last.
  auto advance = [&](int n) {
    const bool is_start = last == 0;
    begins &= ~(1 << n);
    if (place + 1 < last) {
      place++;
    } else if (index < load_int(item_start + blockIdx.x + 1)) {
      const Cohort item = load_cohort(items, index++);
      place = item.first, last = item.last, head = item.head;
      begins |= 1 << n;
    } else {
      return false;
    }
    if (warp == 3) {
      if (is_start && lane < min(AHEAD, last - place)) bring_to_cache(place + lane, head);
      if (lane == 0 && place + AHEAD < last) {
        bring_to_cache(place + AHEAD, head);
      } else if (lane == 0 && index < load_int(item_start + blockIdx.x + 1)) {
        const Cohort item = load_cohort(items, index);
        const int at = item.first + place + AHEAD - last;
        if (at < item.last) bring_to_cache(at, item.head);
      }
    }
    return true;
  };
  // Every lane copies and reads pieces of its own.
  const uint32_t mine = raw + warp * 512 + lane * 16;
  auto copy = [&](int n, int part) {
    const uint8_t* page = source(place);
    if (part == 0 && has_scales)
      copy_async<4>(shared_address(&shared.raw_scales[n][warp][lane]),
                    page + (warp == 0 ? k_scales : v_scales) + head * HEAD_SCALES + lane * 4);
    page += own + head * HEAD_CODES;
#pragma unroll
    for (int i = part * PART; i < (part + 1) * PART; i++)
      copy_async<16>(mine + (n * PIECES + i) * 2048, page + i / ACROSS * 8 * HEAD_DIM + i % ACROSS * 64);
  };
  for (int n = 0; n < HELD; n++) {
    const bool more = advance(n);
    held += more;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      if (more) copy(n, part);
      copy_async_commit();
    }
  }
  for (int n = 0; held > 0; n = n + 1 == HELD ? 0 : n + 1) {
    barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
    const uint32_t at = to + ring.stage * TILE;
    bool more = true;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      copy_async_wait_group<HELD * PARTS - 1>();
      if (part == 0 && has_scales) {
        float2 f = unpack_half2(shared.raw_scales[n][warp][lane]);
        if (warp == 1) {
          // The unit of V scales is a power of two, raised when a page's largest would pass HEADROOM units.
          if (begins >> n & 1) shared.running_unit = 0.f;
          use_unit(f, &shared.running_unit, &shared.v_unit[sets.stage], lane);
        }
        // Tokens 8 i + 2 j + e with lane = 4 i + j: a consumer reads those of its columns at once.
        float* row = &shared.scales[sets.stage][warp][(lane & 3) * SCALE_ROW + (lane >> 2) * 2];
        row[0] = f.x, row[1] = f.y;
        sets.advance(1);
      }
#pragma unroll
      for (int i = part * PART; i < (part + 1) * PART; i++) {
        const uint4 x = load_shared16(mine + (n * PIECES + i) * 2048);
        const uint32_t piece_at = at + i % ACROSS * 8 * CHANNEL_STRIDE + i / ACROSS * TOKEN_STRIDE;
        store16(piece_at, halves_of_e4m3(x.x), halves_of_e4m3(x.x >> 16), halves_of_e4m3(x.y), halves_of_e4m3(x.y >> 16));
        store16(piece_at + CHANNEL_STRIDE, halves_of_e4m3(x.z), halves_of_e4m3(x.z >> 16), halves_of_e4m3(x.w),
                halves_of_e4m3(x.w >> 16));
      }
      if (part + 1 == PARTS) {
        publish_shared();
        __syncwarp();
        if (lane == 0) arrive(full + 8 * ring.stage, 1);
        ring.advance(1);
      }
      if (part == 0) more = advance(n);
      if (more) copy(n, part);
      copy_async_commit();
    }
    held -= !more;
  }
}

// Operand A of the queries, step `k`: rows g and g + 8 of a warp's 16; see prepare.cu for the order of `pieces`.
__device__ __forceinline__ void load_queries(const uint32_t* pieces, int num_kv_heads, int head, const int* refs, int k,
                                             int lane, uint32_t* a) {
  const int j = lane & 3;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int ref = refs[i & 1], step = (k >> 2) * 4 + (i >> 1) * 2 + (j >> 1);
    const size_t place = (size_t)(ref >> 3) * num_kv_heads + head;
    a[i] = ref < 0 ? 0 : pieces[((place * K_STEPS + step) * 32 + (ref & 7) * 4 + (k & 3)) * 4 + (j & 1)];
  }
}

template <bool MASS>
__device__ __forceinline__ void decode(const uint8_t* __restrict__ share, int v_codes, int k_scales, int v_scales,
                                       const int* __restrict__ pages, const uint32_t* __restrict__ pieces,
                                       const float* __restrict__ q_scale, const int* __restrict__ rows,
                                       const int* __restrict__ item_start, const uint4* __restrict__ items,
                                       uint4* __restrict__ part_o, float2* __restrict__ part_ml,
                                       float* __restrict__ part_step, float* __restrict__ mass, int num_heads,
                                       int group, int num_kv_heads, int chained) {
  DYNAMIC_SHARED(128, memory);
  __shared__ Shared shared;
  const int role = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
  const uint32_t k_tiles = shared_address(memory), v_tiles = k_tiles + K_STAGES * TILE;
  const uint32_t raw = v_tiles + V_STAGES * TILE + Q_SHARED * CONSUMERS * Q_TILE;
  const uint32_t k_full = shared_address(shared.k_full), k_empty = shared_address(shared.k_empty);
  const uint32_t v_full = shared_address(shared.v_full), v_empty = shared_address(shared.v_empty);
  if (threadIdx.x == 0) {
    for (int i = 0; i < K_STAGES; i++) barrier_init(k_full + 8 * i, 4), barrier_init(k_empty + 8 * i, CONSUMERS * 4);
    for (int i = 0; i < V_STAGES; i++) barrier_init(v_full + 8 * i, 4), barrier_init(v_empty + 8 * i, CONSUMERS * 4);
    publish_barriers();
  }
  __syncthreads();
  if (role < 2) {
    give_registers<FEED_REGISTERS>();
    if (role == 0)
      feed<true, K_STAGES>(share, 0, k_scales, v_scales, pages, item_start, items, shared, k_full, k_empty, k_tiles, raw,
                           warp, lane);
    else
      feed<false, V_STAGES>(share, v_codes, 0, 0, pages, item_start, items, shared, v_full, v_empty, v_tiles, raw + RAW,
                            warp, lane);
    return;
  }
  take_registers<ROW_REGISTERS>();
  const int me = role - 2, g = lane >> 2, j = lane & 3;
  const uint32_t scales = shared_address(shared.scales) + j * SCALE_ROW * 4;
  const uint32_t q_tile = v_tiles + V_STAGES * TILE + me * Q_TILE;
  const uint64_t queries = tile_descriptor(q_tile, CHANNEL_STRIDE, 128);
  const uint64_t keys = tile_descriptor(k_tiles, CHANNEL_STRIDE, TOKEN_STRIDE);
  const uint64_t values = tile_descriptor(v_tiles, TOKEN_STRIDE, CHANNEL_STRIDE);
  // Pages are fetched, and work lists read, before the queries are there; see tq_decode.cu for the order of kernels.
  auto begin = [&] {
    if (!chained) depend_wait();
    depend_go();
  };
  if (load_int(item_start + blockIdx.x) == load_int(item_start + blockIdx.x + 1)) begin();
  int passed = 0;  // pages of items done
  for (int index = load_int(item_start + blockIdx.x); index < load_int(item_start + blockIdx.x + 1); index++) {
    // A parity tells a round of a ring only from the ones beside it: the consumers begin an item together, see
    // cohort_decode.cu. The tile of queries is not read any more either.
    sync_threads<CONSUMERS * 128>(1 + CONSUMERS);
    const Cohort item = load_cohort(items, index);
    const int blocks = item.blocks & 255, block = me % blocks, step = 3 - blocks, count = item.last - item.first;
    const int* refs_at = rows + (item.rows + block) * ROWS + warp * 16 + g;
    const int refs[2] = {load_int(refs_at), load_int(refs_at + 8)};
    if (passed == 0) begin();
    uint32_t q[Q_SHARED ? 1 : K_STEPS][4];
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
      uint32_t a[4];
      load_queries(pieces, num_kv_heads, item.head, refs, k, lane, a);
      if constexpr (Q_SHARED) {
        const uint32_t to = q_tile + k * 2 * CHANNEL_STRIDE + warp * 256 + lane * 4;
        store4(to, a[0]), store4(to + 128, a[1]);
        store4(to + CHANNEL_STRIDE, a[2]), store4(to + CHANNEL_STRIDE + 128, a[3]);
      } else {
        q[k][0] = a[0], q[k][1] = a[1], q[k][2] = a[2], q[k][3] = a[3];
      }
    }
    if constexpr (Q_SHARED) {
      publish_shared();
      sync_threads<128>(1 + me);
    }
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const size_t place = (size_t)(refs[i] >> 3) * num_kv_heads + item.head;
      scale[i] = refs[i] < 0 ? 0.f : q_scale[place * COLUMNS + (refs[i] & 7)];
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
    float S[32];
    // Scores of the page in this stage; a page behind the last one gives some that are not used.
    auto score = [&](int stage) {
      const uint64_t tile = keys + (uint64_t)(stage * TILE >> 4);
      constexpr uint64_t ALONG = 2 * CHANNEL_STRIDE >> 4;
      wgmma_fence();
      if constexpr (Q_SHARED) wgmma_f16_n64<false>(S, queries, tile);
      else wgmma_f16<64, false, false>(S, q[0], tile);
#pragma unroll
      for (int k = 1; k < K_STEPS; k++) {
        if constexpr (Q_SHARED) wgmma_f16_n64<true>(S, queries + k * ALONG, tile + k * ALONG);
        else wgmma_f16<64>(S, q[k], tile + k * ALONG);
      }
      wgmma_commit();
    };
    auto score_next = [&] {
      k_ring.advance(step);
      if (p + step < count) barrier_wait(k_full + 8 * k_ring.stage, k_ring.phase);
      score(k_ring.stage);
    };
    // A tile of keys is given back once its scores are there.
    auto give_back = [&](int page) {
      if (lane == 0 && page < count) arrive(k_empty + 8 * k_ring.stage, step);
    };
    if (p < count) barrier_wait(k_full + 8 * k_ring.stage, k_ring.phase);
    score(k_ring.stage);
    wgmma_wait<0>();
    give_back(p);
    int v_stage = -1;  // whose product runs
    for (; p < count; p += step) {
      const uint32_t page_scales = scales + sets.stage * (2 * SCALE_SET * 4);
      const float page_unit = shared.v_unit[sets.stage];
      float s[32];
#pragma unroll
      for (int u = 0; u < 4; u++) {
        const float4 k_scale = load_floats(page_scales + u * 16);
#pragma unroll
        for (int x = 0; x < 8; x++) {
          const float t = S[u * 8 + x] * scale_of(k_scale, x);
          s[u * 8 + x] = x & 2 ? fmaf(t, scale[1], -run.m1) : fmaf(t, scale[0], -run.m0);
        }
      }
      if constexpr (EARLY) score_next();  // runs under this page's softmax
      const Weighed now = weigh(run, s, page_unit);
      scale_weights(s, page_scales + SCALE_SET * 4);
      settle<32>(s);
      if (MASS)
        write_row_mass(mass, load_cohort(items, index), p, block, now.sum0, now.sum1, run, scale, num_heads, group, warp,
                       lane);
      sets.advance(step);
      wgmma_wait<0>();
      if (lane == 0 && v_stage >= 0) arrive(v_empty + 8 * v_stage, step);
      if constexpr (EARLY) give_back(p + step);
      if (now.moves) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++)
          O[i * 4] *= now.f0, O[i * 4 + 1] *= now.f0, O[i * 4 + 2] *= now.f1, O[i * 4 + 3] *= now.f1;
      }
      uint32_t P[16];
#pragma unroll
      for (int i = 0; i < 16; i++) P[i] = pack_half2(s[2 * i], s[2 * i + 1]);
      v_stage = v_ring.stage;
      if constexpr (!EARLY) score_next();
      barrier_wait(v_full + 8 * v_stage, v_ring.phase);
      v_ring.advance(step);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++)
        wgmma_f16<HEAD_DIM, true>(O, P + 4 * k, values + (uint64_t)((v_stage * TILE + k * 2 * TOKEN_STRIDE) >> 4));
      wgmma_commit();
      if constexpr (!EARLY) {
        wgmma_wait<1>();  // the product with V runs under the next page's softmax
        give_back(p + step);
      }
    }
    wgmma_wait<0>();
    settle<HEAD_DIM / 2>(O);
    if (lane == 0 && v_stage >= 0) arrive(v_empty + 8 * v_stage, step);
    write_rows(O, run, item.slot + me, run.v_unit, part_o, part_ml, part_step, warp, lane);
  }
  if (chained) depend_wait();
}

#define KERNEL(NAME, MASS)                                                                                         \
  extern "C" __global__ void __launch_bounds__(512, 1)                                                             \
      NAME(const uint8_t* share, int v_codes, int k_scales, int v_scales, const int* pages, const uint32_t* pieces,  \
           const float* q_scale, const int* rows, const int* item_start, const uint4* items, uint4* part_o,        \
           float2* part_ml, float* part_step, float* mass, int num_heads, int group, int num_kv_heads,             \
           int chained) {                                                                                          \
    decode<MASS>(share, v_codes, k_scales, v_scales, pages, pieces, q_scale, rows, item_start, items, part_o,      \
                 part_ml, part_step, mass, num_heads, group, num_kv_heads, chained);                               \
  }
KERNEL(cohort_fp8, false)
KERNEL(cohort_fp8_mass, true)
extern "C" __device__ const int shared_bytes = SHARED;
