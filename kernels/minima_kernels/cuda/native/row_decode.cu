// Decode over pages in row order: FP8 with a scale per token, BF16, F16; sealed ones and open ones.
//   score = (K . q) * k_scale[token],  out += P * V     m16n8k16, q as the sum of two 16-bit floats
// A warp takes a quarter of every page, or whole pages where their mass is asked for, 16 tokens at a time
// through a ring of its own, filled by 16-byte asynchronous copies that permute the pieces of a row, so that no
// read of an operand meets a bank twice: row order costs nothing here, and a page that becomes full needs no
// other layout. FP8 becomes 16-bit operands in registers.
// Macros: HEAD_DIM, FORMAT (0 FP8, 1 F16, 2 BF16), WARPS, STAGES, MIN_BLOCKS.
#include "common.cuh"

constexpr bool FP8 = FORMAT == 0, BF16 = FORMAT == 2;
constexpr int ELEMENT = FP8 ? 1 : 2, TOKENS = 16;           // tokens of a tile
constexpr int ROW = HEAD_DIM * ELEMENT, PIECES = ROW / 16;  // bytes and 16-byte pieces of a token
constexpr int HALF = TOKENS * ROW, SCALES = FP8 ? PAGE * 2 : 0, TILE_SCALES = FP8 ? TOKENS * 2 : 0;
constexpr int STAGE = (2 * HALF + 2 * TILE_SCALES + 127) / 128 * 128;
constexpr int RING = STAGES * STAGE > HEAD_DIM * 40 ? STAGES * STAGE : (HEAD_DIM * 40 + 127) / 128 * 128;
constexpr int STEPS = HEAD_DIM / 16;
constexpr bool Q_SHARED = HEAD_DIM > 128;  // query operands in shared memory: registers are short
constexpr int SHARED = WARPS * RING + (Q_SHARED ? STEPS * 512 : 0);
constexpr float LIMIT = 32768.f;
constexpr int PARTS = PAGE / TOKENS;  // tiles of a page
static_assert(WARPS == PARTS, "a warp for each quarter of a page");

__device__ __forceinline__ void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  if constexpr (BF16) mma_bf16(c, a, b0, b1);
  else mma_f16(c, a[0], a[1], a[2], a[3], b0, b1);
}
// Where piece `c` of token `t` of a tile lies. FP8: keys are read by pairs of neighbouring tokens, four
// pieces each, values by four even or odd tokens, two pieces each. 16 bits: eight tokens, one piece.
__device__ __forceinline__ uint32_t place(int t, int c) {
  const int fold = FP8 ? (t >> 1 & 1) << 1 | ((t >> 2 ^ t) & 1) << 2 : t & 7;
  return t * ROW + (c ^ (fold & (PIECES < 8 ? PIECES - 1 : 7))) * 16;
}

template <bool MASS>
__device__ __forceinline__ void decode(const uint8_t* __restrict__ share, int v_codes, int k_scales, int v_scales,
                                       const int* __restrict__ pages, const uint4* __restrict__ q_halves,
                                       const float* __restrict__ q_scale, const int* __restrict__ tile_columns,
                                       const int* __restrict__ item_start, const uint4* __restrict__ items,
                                       float* __restrict__ part_o, float2* __restrict__ part_ml,
                                       float* __restrict__ mass, int num_heads, int group, int num_kv_heads,
                                       int chained) {
  DYNAMIC_SHARED(128, memory);
  __shared__ float2 sums[WARPS][COLUMNS];
  __shared__ MassPlaces places[MASS ? WARPS : 1];
  __shared__ Held held[WARPS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const uint32_t ring = shared_address(memory) + warp * RING;
  const uint32_t q_shared = shared_address(memory) + WARPS * RING;
  const int start = item_start[blockIdx.x], stop = item_start[blockIdx.x + 1];
  for (int index = start; index < stop; index++) {
    const Item item = load_item(items, index);
    // Pages of this warp, and how many tiles it takes of each: all there are, but of the last of the segment those
    // up to its last token.
    const int first = MASS ? item.first + warp : item.first, stride = MASS ? WARPS : 1;
    constexpr int TILES = MASS ? PARTS : 1;
    const int count = first < item.last ? (item.last - first + stride - 1) / stride : 0;
    const bool has_last = count > 0 && first + (count - 1) * stride == item.last - 1;
    const int last_parts = (item.last_len + TOKENS - 1) / TOKENS;
    const int last_tiles = !has_last ? TILES : MASS ? last_parts : warp < last_parts;
    const int num_tiles = count > 0 ? (count - 1) * TILES + last_tiles : 0;
    const bool is_open = has_last && last_tiles > 0;
    int fetched = 0, fetch_page = count > 0 ? pages[first] : 0, next_page = 0;
    auto part_of = [&](int tile) { return MASS ? tile % PARTS : warp; };
    auto fetch = [&] {
      if (fetched < num_tiles) {
        const int part = part_of(fetched);
        if (fetched % TILES == 0) {
          if (fetched > 0) fetch_page = next_page;
          const int next = fetched / TILES + 1;
          if (next < count) next_page = pages[first + next * stride];  // arrives before it is needed
        }
        const uint32_t stage = ring + fetched % STAGES * STAGE;
        const uint8_t* page = share + (size_t)fetch_page * GRANULE;
        const uint8_t* k = page + (size_t)item.head * PAGE * ROW + part * HALF;
#pragma unroll
        for (int i = 0; i < HALF / 512; i++) {
          const int piece = i * 32 + lane, t = piece / PIECES, c = piece % PIECES;
          copy_async<16>(stage + place(t, c), k + piece * 16);
          copy_async<16>(stage + HALF + place(t, c), k + v_codes + piece * 16);
        }
        if (FP8 && lane < 4) {
          const uint8_t* s = page + (lane < 2 ? k_scales : v_scales) + item.head * SCALES + part * TILE_SCALES;
          copy_async<16>(stage + 2 * HALF + lane * 16, s + lane % 2 * 16);
        }
      }
      fetched++;
      copy_async_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch();
    if (index == start) {
      if (!chained) depend_wait();
      depend_go();
    }
    const uint4* q_source = q_halves + (size_t)item.tile * STEPS * 32;
    uint4 q[Q_SHARED ? 1 : STEPS];
    if constexpr (Q_SHARED) {
      for (int i = threadIdx.x; i < STEPS * 32; i += WARPS * 32)
        reinterpret_cast<uint4*>(memory + WARPS * RING)[i] = load_here(q_source + i);
      __syncthreads();
    } else {
#pragma unroll
      for (int i = 0; i < STEPS; i++) q[i] = load_here(q_source + i * 32 + lane);
    }
    const float2 scale = *reinterpret_cast<const float2*>(q_scale + item.tile * COLUMNS + 2 * j);
    const int* columns = tile_columns + item.tile / num_kv_heads * COLUMNS;
    hold_item(held[warp], item, columns);
    if (MASS) set_mass_places(places[warp], columns, item, num_heads, group);
    float O[STEPS][4];
#pragma unroll
    for (int i = 0; i < STEPS; i++) O[i][0] = O[i][1] = O[i][2] = O[i][3] = 0.f;
    Running run;
    float page0 = 0.f, page1 = 0.f;  // sums of the page so far, for its mass
    for (int tile = 0; tile < num_tiles; tile++) {
      fetch();  // into the stage that the previous tile left
      copy_async_wait_group<STAGES - 1>();
      __syncwarp();
      const uint32_t keys = ring + tile % STAGES * STAGE, values = keys + HALF, scales = values + HALF;
      const int part = part_of(tile);
      const bool is_last = tile == num_tiles - 1;
      const int valid = is_last && is_open ? min(item.last_len - part * TOKENS, TOKENS) : TOKENS;
      if (valid < TOKENS) {  // bytes not written yet may be NaN, and zero times NaN is not zero
        for (int i = lane; i < (TOKENS - valid) * PIECES; i += 32) store16(values + (valid * PIECES + i) * 16, 0, 0, 0, 0);
        __syncwarp();
      }
      float s[4] = {0.f, 0.f, 0.f, 0.f}, low[4] = {0.f, 0.f, 0.f, 0.f};
      auto query = [&](int step) {
        if constexpr (Q_SHARED) return load_shared16(q_shared + (step * 32 + lane) * 16);
        else return q[step];
      };
      if constexpr (FP8) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 64; i++) {
          const uint4 x = load_shared16(keys + place(g, 4 * i + j)), y = load_shared16(keys + place(g + 8, 4 * i + j));
          const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
          for (int u = 0; u < 4; u++) {
            const uint32_t k[4] = {halves_of_e4m3(a[u]), halves_of_e4m3(b[u]), halves_of_e4m3(a[u] >> 16), halves_of_e4m3(b[u] >> 16)};
            const uint4 f = query(4 * i + u);
            mma(s, k, f.x, f.y);
            mma(low, k, f.z, f.w);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
          uint32_t k[4];
          load_matrices(keys + place(lane & 15, 2 * i + (lane >> 4)), k);
          const uint4 f = query(i);
          mma(s, k, f.x, f.y);
          mma(low, k, f.z, f.w);
        }
      }
      float v0 = 1.f, v1 = 1.f, k0 = 1.f, k1 = 1.f;
      if (FP8) {
        k0 = load_shared_half(scales + g * 2), k1 = load_shared_half(scales + 16 + g * 2);
        v0 = load_shared_half(scales + TILE_SCALES + g * 2), v1 = load_shared_half(scales + TILE_SCALES + 16 + g * 2);
      }
      s[0] = (s[0] + low[0]) * k0 * scale.x, s[1] = (s[1] + low[1]) * k0 * scale.y;
      s[2] = (s[2] + low[2]) * k1 * scale.x, s[3] = (s[3] + low[3]) * k1 * scale.y;
      if (valid < TOKENS) {
        if (g >= valid) s[0] = s[1] = -INFINITY, v0 = 0.f;
        if (g + 8 >= valid) s[2] = s[3] = -INFINITY, v1 = 0.f;
      }
      float e[4], sum0, sum1;
      for (bool moved = false;; moved = true) {  // the reference moves only when a weight would pass the limit
        e[0] = exp2_fast(s[0] - run.m0), e[1] = exp2_fast(s[1] - run.m1);
        e[2] = exp2_fast(s[2] - run.m0), e[3] = exp2_fast(s[3] - run.m1);
        sum0 = e[0] + e[2], sum1 = e[1] + e[3];
        e[0] *= v0, e[1] *= v0, e[2] *= v1, e[3] *= v1;
        const bool fits = fmaxf(fmaxf(e[0], e[1]), fmaxf(e[2], e[3])) < LIMIT && sum0 < 1e30f && sum1 < 1e30f;
        if (moved || !__any_sync(~0u, !fits)) break;
        const float a = log2_fast(fmaxf(v0, 5.9604645e-8f)), b = log2_fast(fmaxf(v1, 5.9604645e-8f));
        const float m0 = fmaxf(run.m0, max_rows(fmaxf(s[0] + a, s[2] + b)) - 10.f);
        const float m1 = fmaxf(run.m1, max_rows(fmaxf(s[1] + a, s[3] + b)) - 10.f);
        const float f0 = exp2_fast(run.m0 - m0), f1 = exp2_fast(run.m1 - m1);
        run.m0 = m0, run.m1 = m1;
        run.l0 *= f0, run.l1 *= f1;
        page0 *= f0, page1 *= f1;
#pragma unroll
        for (int i = 0; i < STEPS; i++) O[i][0] *= f0, O[i][1] *= f1, O[i][2] *= f0, O[i][3] *= f1;
      }
      run.l0 += sum0, run.l1 += sum1;
      if (MASS) {
        page0 += sum0, page1 += sum1;
        if (part == PARTS - 1 || is_last) {
          PageSum sum;
          sum.begin(page0, page1), sum.step(8), sum.step(16);
          sum.write(mass, places[warp], warp + tile / PARTS * WARPS, run.m0, run.m1);
          page0 = page1 = 0.f;
        }
      }
      uint32_t p0, p1, r0 = 0, r1 = 0;
      if constexpr (BF16) {  // eight bits are too few for a weight: high and low part
        const float h0 = __uint_as_float(__float_as_uint(e[0]) & 0xFFFF0000u), h1 = __uint_as_float(__float_as_uint(e[1]) & 0xFFFF0000u);
        const float h2 = __uint_as_float(__float_as_uint(e[2]) & 0xFFFF0000u), h3 = __uint_as_float(__float_as_uint(e[3]) & 0xFFFF0000u);
        p0 = transpose8x8(pack_bf16(h0, h1)), p1 = transpose8x8(pack_bf16(h2, h3));
        r0 = transpose8x8(pack_bf16(e[0] - h0, e[1] - h1)), r1 = transpose8x8(pack_bf16(e[2] - h2, e[3] - h3));
      } else {
        p0 = transpose8x8(pack_half2(e[0], e[1])), p1 = transpose8x8(pack_half2(e[2], e[3]));
      }
      if constexpr (FP8) {
        // A lane holds tokens 2j, 2j + 1 and those plus 8 of 16 channels (8 of head dim 64).
        constexpr int WORDS = HEAD_DIM == 64 ? 2 : 4, SETS = HEAD_DIM == 256 ? 2 : 1;
#pragma unroll
        for (int set = 0; set < SETS; set++) {
          uint32_t w[4][WORDS];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int t = 2 * j + (i & 1) + (i >> 1) * 8;
            if constexpr (WORDS == 4) {
              const uint4 x = load_shared16(values + place(t, g + 8 * set));
              w[i][0] = x.x, w[i][1] = x.y, w[i][2] = x.z, w[i][3] = x.w;
            } else {
              const uint2 x = load_shared8(values + place(t, g >> 1) + (g & 1) * 8);
              w[i][0] = x.x, w[i][1] = x.y;
            }
          }
#pragma unroll
          for (int u = 0; u < WORDS; u++)
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
              const uint32_t pick = pair ? 0x7362 : 0x5140;  // channels 2 * pair and 2 * pair + 1 of two tokens
              const uint32_t x = prmt(w[0][u], w[1][u], pick), y = prmt(w[2][u], w[3][u], pick);
              const uint32_t v[4] = {halves_of_e4m3(x), halves_of_e4m3(x >> 16), halves_of_e4m3(y), halves_of_e4m3(y >> 16)};
              mma(O[(set * WORDS + u) * 2 + pair], v, p0, p1);
            }
        }
      } else {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
          uint32_t v[4];
          load_matrices_transposed(values + place((lane & 7) + (lane >> 4) * 8, 2 * i + (lane >> 3 & 1)), v);
          mma(O[i], v, p0, p1);
          if (BF16) mma(O[i], v, r0, r1);
        }
      }
      __syncwarp();
    }
    copy_async_wait();
    write_partial<HEAD_DIM, WARPS>(O, run, 1.f, memory, RING, sums, held[warp], part_o, part_ml, [&](int i, int half) {
                                     if (!FP8) return i * 16 + half * 8 + g;
                                     constexpr int OWN = HEAD_DIM == 64 ? 8 : 16;  // channels per lane and set
                                     return (i / (OWN / 2) * 8 + g) * OWN + i % (OWN / 2) * 2 + half;
                                   });
    __syncthreads();
  }
  if (start == stop) {
    if (!chained) depend_wait();
    depend_go();
  }
  if (chained) depend_wait();
}

#define KERNEL(NAME, MASS)                                                                                            \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)                                                \
      NAME(const uint8_t* share, int v_codes, int k_scales, int v_scales, const int* pages, const uint4* q_halves,    \
           const float* q_scale, const int* tile_columns, const int* item_start, const uint4* items, float* part_o,   \
           float2* part_ml, float* mass, int num_heads, int group, int num_kv_heads, int chained) {                   \
    decode<MASS>(share, v_codes, k_scales, v_scales, pages, q_halves, q_scale, tile_columns, item_start, items,       \
                 part_o, part_ml, mass, num_heads, group, num_kv_heads, chained);                                     \
  }
KERNEL(row_decode, false)
KERNEL(row_decode_mass, true)
extern "C" __device__ const int shared_bytes = SHARED;
