// Query fragments of a decode step: one block per tile of eight columns and KV head, one warp per column.
// A column is scaled to a largest magnitude of one or a little less; what it was, with the factor on the scores and
// log2(e), is kept apart. Written are, as operands of the products that read them,
//   bytes:  15-bit integers as high * 128 + low, in the order of m16n8k32 operands; high alone is an 8-bit one
//   halves: the sum of two 16-bit floats, in the order of 16-byte pieces of FP8 rows (also of key means)
//           and, where BF16 or F16 pages are read, in the plain order.
// Macro: HEAD_DIM.
#include "channels.cuh"

struct Halves {
  uint32_t high, low;
};
__device__ __forceinline__ Halves split(float x, float y, bool bf16) {
  if (bf16) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    const float2 f = __bfloat1622float2(h);
    const __nv_bfloat162 l = __floats2bfloat162_rn(x - f.x, y - f.y);
    return {*reinterpret_cast<const uint32_t*>(&h), *reinterpret_cast<const uint32_t*>(&l)};
  }
  const uint32_t h = pack_half2(x, y);
  const float2 f = unpack_half2(h);
  return {h, pack_half2(x - f.x, y - f.y)};
}

// `columns[tile][8]`: row * query heads + head within the group, or -1. `dtype`: 0 float32, 1 float16,
// 2 bfloat16. `q_bytes` may be null, `plain` too (`plain_bf16` says what it holds). With `rotate` the
// columns are first transformed by the normalised Hadamard matrix after `signs` (may be null).
extern "C" __global__ void __launch_bounds__(256)
    prepare(const void* q, int dtype, const int* columns, int num_kv_heads, int group, float scale_log2, int rotate,
            const float* signs, uint32_t* q_bytes, int q_plane, uint32_t* pieces, uint32_t* plain,
            int plain_bf16, float* q_scale) {
  const int tile = blockIdx.x, head = tile % num_kv_heads, n = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int column = columns[tile / num_kv_heads * COLUMNS + n];
  // In this order: what follows may read pages as soon as it starts, and those were written before.
  depend_wait();
  depend_go();
  if (columns[tile / num_kv_heads * COLUMNS] < 0) return;  // a tile that is not there
  float v[OWN] = {};
  if (column >= 0) load_own(v, q, (size_t)(column + head * group) * HEAD_DIM + lane * OWN, dtype);
  if (rotate) rotate_basis(v, signs, lane);
  float largest = 0.f;
#pragma unroll
  for (int e = 0; e < OWN; e++) largest = fmaxf(largest, fabsf(v[e]));
#pragma unroll
  for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
  largest = fmaxf(largest, 1e-20f);
  // Where no integers are made, a power of two: a 16-bit query is then its high half, exactly.
  if (!q_bytes) largest = __uint_as_float((__float_as_uint(largest) + 0x7FFFFFu) & 0x7F800000u);
  if (lane == 0) q_scale[tile * COLUMNS + n] = largest * scale_log2;
#pragma unroll
  for (int e = 0; e < OWN; e++) v[e] /= largest;
#pragma unroll
  for (int e = 0; e < OWN; e += 2) {
    const int d = lane * OWN + e;
    const Halves h = split(v[e], v[e + 1], false);
    const int piece = d >> 4, step = (piece >> 2) * 4 + ((d & 15) >> 2);
    uint32_t* to = pieces + (((size_t)tile * (HEAD_DIM / 16) + step) * 32 + n * 4 + (piece & 3)) * 4 + (d >> 1 & 1);
    to[0] = h.high, to[2] = h.low;
    if (plain) {
      const Halves p = split(v[e], v[e + 1], plain_bf16);
      to = plain + (((size_t)tile * (HEAD_DIM / 16) + (d >> 4)) * 32 + n * 4 + (d >> 1 & 3)) * 4 + (d >> 3 & 1);
      to[0] = p.high, to[2] = p.low;
    }
  }
  if (!q_bytes) return;
  constexpr int FOUR = OWN < 4 ? 4 : OWN;
  float w[FOUR];
#pragma unroll
  for (int e = 0; e < OWN; e++) w[e] = v[e];
  if constexpr (OWN == 2) w[2] = __shfl_down_sync(~0u, v[0], 1), w[3] = __shfl_down_sync(~0u, v[1], 1);
  if (OWN == 2 && lane & 1) return;
#pragma unroll
  for (int e = 0; e < FOUR; e += 4) {
    uint32_t high = 0, low = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int x = __float2int_rn(w[e + i] * 16256.f), h = (x + 64) >> 7;
      high |= (uint32_t)(uint8_t)(int8_t)h << 8 * i;
      low |= (uint32_t)(uint8_t)(int8_t)(x - h * 128) << 8 * i;
    }
    const int d = lane * OWN + e, at = (d >> 5) * 64 + (n * 4 + ((d & 15) >> 2)) * 2 + (d >> 4 & 1);
    q_bytes[(size_t)tile * HEAD_DIM * 2 + at] = high;
    q_bytes[(size_t)(q_plane + tile) * HEAD_DIM * 2 + at] = low;
  }
}
