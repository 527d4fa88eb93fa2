// Pages of one format from those of another, a block per KV head of a page. Values stay in registers: a lane
// holds chunks of four channels of eight tokens, which is what a word of codes in fragment order is made of (see
// order.py).
// Macros: HEAD_DIM; FROM, TO (0 FP8, 1 F16, 2 BF16, 3 TQ); of TQ formats FROM_K_BITS, FROM_V_BITS,
// FROM_CENTRED, TO_K_BITS ...; of the codebooks of 2, 3 and 4 bits the levels above zero, a byte each from the
// lowest on, BOOK_2 ..., and their steps, STEP_2 ...
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "common.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, FP8 = 0, F16 = 1, BF16 = 2, TQ = 3;
constexpr int LANES = HEAD_DIM / 4 < 32 ? HEAD_DIM / 4 : 32;  // lanes of a token
constexpr int AT_ONCE = 32 / LANES, TOKENS = PAGE / WARPS / AT_ONCE, CHUNKS = HEAD_DIM / 4 / LANES, OWN = 4 * CHUNKS;
constexpr float E4M3_MAX = 448.f, MIN_SCALE = 6.103515625e-05f, TINY = 1.17549435e-38f, HALF_MAX = 65504.f;
// Words of codes in shared memory, four codes each: of K by token and chunk, of V by channel and token group.
constexpr int K_ROW = HEAD_DIM / 4 + 4, V_ROW = PAGE / 4 + 1;
constexpr int TILE = PAGE * K_ROW > HEAD_DIM * V_ROW ? PAGE * K_ROW : HEAD_DIM * V_ROW;

// A KV head's share of a TQ page.
template <int K_BITS, int V_BITS, bool CENTRED>
struct Share {
  static constexpr int K_CODES = PAGE * HEAD_DIM * K_BITS / 8, V_CODES = PAGE * HEAD_DIM * V_BITS / 8;
  static constexpr int K_SCALES = K_CODES, MEAN = K_SCALES + 2 * PAGE, V = MEAN + (CENTRED ? 2 * HEAD_DIM : 0);
  static constexpr int V_SCALES = V + V_CODES, BYTES = V_SCALES + 2 * PAGE;
};
using From = Share<FROM_K_BITS, FROM_V_BITS, FROM_CENTRED>;
using To = Share<TO_K_BITS, TO_V_BITS, TO_CENTRED>;
constexpr int LARGEST = (FROM == TQ ? From::BYTES : 0) > (TO == TQ ? To::BYTES : 0) ? (FROM == TQ ? From::BYTES : 0)
                                                                                   : (TO == TQ ? To::BYTES : 0);
constexpr int SHARED = FROM == TQ || TO == TQ ? LARGEST + TILE * 4 : 0;
static_assert(From::BYTES % 16 == 0 && To::BYTES % 16 == 0, "shares are copied in pieces of 16 bytes");

// Levels above zero of the book of so many bits, and the boundaries between them, rounded as codebook.py does.
template <int BITS>
struct Book {
  static constexpr int HALF = 1 << (BITS - 1);
  float levels[HALF], edges[HALF];  // the last edge is not one
  __host__ __device__ constexpr Book() : levels{}, edges{} {
    const uint64_t bytes = BITS == 2 ? BOOK_2 : BITS == 3 ? BOOK_3 : BOOK_4;
    const double step = BITS == 2 ? STEP_2 : BITS == 3 ? STEP_3 : STEP_4;
    for (int i = 0; i < HALF; i++) {
      const double level = (double)(bytes >> 8 * i & 255) * step;
      levels[i] = (float)level;
      if (i < HALF - 1) edges[i] = (float)((level + (double)(bytes >> 8 * (i + 1) & 255) * step) / 2);
    }
  }
};

// All levels of a book as bytes, plus 128, from the lowest on.
template <int HALF>
struct Bytes {
  uint32_t words[4];
  __host__ __device__ constexpr Bytes(uint64_t upper) : words{} {
    for (int i = 0; i < HALF; i++) {
      const uint32_t level = (uint32_t)(upper >> 8 * i & 255);
      const int above = HALF + i, below = HALF - 1 - i;
      words[above / 4] |= (128 + level) << 8 * (above % 4);
      words[below / 4] |= (128 - level) << 8 * (below % 4);
    }
  }
};

// The level nearest to a magnitude by bisection; the bits of its number flip those of `codes` from `SHIFT` on.
template <int COUNT, int SHIFT>
__host__ __device__ __forceinline__ float nearest(float magnitude, const float* levels, const float* edges,
                                                  uint32_t& codes) {
  if constexpr (COUNT == 1) {
    return levels[0];
  } else {
    constexpr int HALF = COUNT / 2;
    const bool is_upper = magnitude > edges[HALF - 1];
    float some_levels[HALF], some_edges[HALF];
#pragma unroll
    for (int i = 0; i < HALF; i++) {
      some_levels[i] = is_upper ? levels[HALF + i] : levels[i];
      some_edges[i] = i == HALF - 1 ? 0.f : is_upper ? edges[HALF + i] : edges[i];
    }
    if (is_upper) codes ^= (uint32_t)HALF << SHIFT;
    return nearest<HALF, SHIFT>(magnitude, some_levels, some_edges, codes);
  }
}
template <int E>
struct Byte {
  static constexpr int value = E;
};
// Codes of four zeros: the highest below zero.
template <int BITS>
constexpr uint32_t BELOW = ((1 << (BITS - 1)) - 1) * 0x01010101u;
// Puts the code of a value, in units of the root mean square, in byte E of `codes`, which begins as BELOW.
// Returned is the magnitude that it stands for.
template <int BITS, int E>
__host__ __device__ __forceinline__ float quantise(float unit, uint32_t& codes) {
  constexpr int HALF = 1 << (BITS - 1);
  constexpr Book<BITS> book;
  float levels[HALF], edges[HALF];
#pragma unroll
  for (int i = 0; i < HALF; i++) levels[i] = book.levels[i], edges[i] = book.edges[i];
  if (unit > 0.f) codes ^= (2 * HALF - 1u) << 8 * E;
  return nearest<HALF, 8 * E>(fabsf(unit), levels, edges, codes);
}

// Eight registers of four codes, a code per byte, to BITS words of fragment order, and back.
template <int BITS>
__host__ __device__ __forceinline__ void pack(const uint32_t* r, uint32_t* w) {
  uint32_t pairs[4];  // nibbles of registers 2 i and 2 i + 1
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t x = r[2 * i], y = r[2 * i + 1];
    x = (x | x >> 4) & 0x00FF00FFu, y = (y | y >> 4) & 0x00FF00FFu;
    pairs[i] = ((x | x >> 8) & 0xFFFFu) | (y | y >> 8) << 16;
  }
  if constexpr (BITS == 2) {
    w[0] = pairs[0] | pairs[1] << 2, w[1] = pairs[2] | pairs[3] << 2;
  } else if constexpr (BITS == 3) {
#pragma unroll
    for (int i = 0; i < 3; i++) w[i] = pairs[i] | (pairs[3] >> i & 0x11111111u) << 3;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = (pairs[i] >> 1 & 0x77777777u) | (pairs[i] & 0x11111111u) << 3;
  }
}
// The levels of four codes, nibbles of the lower half of `codes`, in units of the book's step plus 128.
template <int BITS>
__device__ __forceinline__ uint32_t look_up(uint32_t codes) {
  constexpr uint64_t upper = BITS == 2 ? BOOK_2 : BITS == 3 ? BOOK_3 : BOOK_4;
  constexpr int HALF = 1 << (BITS - 1);
  constexpr Bytes<HALF> table(upper);
  if constexpr (BITS < 4) return prmt(table.words[0], table.words[1], codes);
  const uint32_t low = prmt(table.words[0], table.words[1], codes & 0x7777u);
  const uint32_t high = prmt(table.words[2], table.words[3], codes & 0x7777u);
  uint32_t is_high = prmt(0x80u, 0u, codes & 0x8888u) & 0x7F7F7F7Fu;  // the sign of 0x80 where the top bit is set
  is_high |= is_high << 1;
  return (high & is_high) | (low & ~is_high);
}
template <int BITS>
__device__ __forceinline__ void unpack_levels(const uint32_t* w, uint32_t* r) {
  uint32_t pairs[4];
  if constexpr (BITS == 2) {
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = w[i / 2] >> 2 * (i & 1) & 0x33333333u;
  } else if constexpr (BITS == 3) {
    pairs[3] = 0;
#pragma unroll
    for (int i = 0; i < 3; i++) pairs[i] = w[i] & 0x77777777u, pairs[3] |= (w[i] >> 3 & 0x11111111u) << i;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = (w[i] & 0x77777777u) << 1 | (w[i] >> 3 & 0x11111111u);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) r[2 * i] = look_up<BITS>(pairs[i] & 0xFFFFu), r[2 * i + 1] = look_up<BITS>(pairs[i] >> 16);
}
// Byte e of four levels: 2^23 plus the byte is a float whose bits hold the byte.
template <int BITS>
__device__ __forceinline__ float level_of(uint32_t levels, int e) {
  constexpr float STEP = (float)(BITS == 2 ? STEP_2 : BITS == 3 ? STEP_3 : STEP_4);
  return (__uint_as_float(prmt(levels, 0x4B000000u, 0x7540u | e)) - 8388736.f) * STEP;
}
// Where word `u` of a lane's group lies among the codes.
template <int BITS>
__host__ __device__ __forceinline__ int word_at(int group, int u, int lane) {
  const int flat = group * BITS + u;
  return (flat >> 2) * 512 + lane * 16 + (flat & 3) * 4;
}
// Where register r of a lane's group lies among the words of codes.
template <bool IS_VALUE>
__host__ __device__ __forceinline__ int register_at(int group, int r, int lane) {
  const int row = lane >> 2, quarter = lane & 3;
  if (IS_VALUE) return (16 * group + 8 * (r & 1) + row) * V_ROW + 4 * (r >> 1) + quarter;
  constexpr int PER_TILE = HEAD_DIM / 64;
  const int token = 16 * (group / PER_TILE) + 8 * (r & 1) + row;
  return token * K_ROW + 16 * (group % PER_TILE) + 8 * (r >> 2) + 4 * (r >> 1 & 1) + quarter;
}
// Place of a token's scale: a lane reads those of its rows at once.
__host__ __device__ __forceinline__ int scale_at(int token) { return (token & 7) * 8 + (token >> 4) * 2 + (token >> 3 & 1); }

// A thread's place: tokens and channels of its values. Tokens come in groups of four, which share a word of V:
// 2 j, 2 j + 1, 2 j + 8, 2 j + 9 of sixteen.
struct Place {
  int warp, lane, part;  // part: which of the tokens that a warp holds at once
  __device__ __forceinline__ int group(int i) const { return (warp * AT_ONCE + part) * (TOKENS / 4) + i / 4; }
  __device__ __forceinline__ int token(int i) const {
    const int n = group(i);
    return n / 4 * 16 + n % 4 * 2 + (i & 1) + (i >> 1 & 1) * 8;
  }
  __device__ __forceinline__ int chunk(int c) const { return lane % LANES + c * LANES; }
};

// Sums or maxima of a warp's tokens over their lanes, all tokens at once: four lanes get that of one token, number
// `lane % LANES / 4`.
template <bool IS_MAX>
__device__ __forceinline__ float reduce_rows(float (&v)[TOKENS], int lane) {
  static_assert(LANES == 4 * TOKENS, "four lanes a token");
  auto both = [](float a, float b) { return IS_MAX ? fmaxf(a, b) : a + b; };
#pragma unroll
  for (int n = TOKENS / 2; n; n /= 2) {
    const bool is_upper = lane & 4 * n;
#pragma unroll
    for (int i = 0; i < n; i++) {
      const float kept = is_upper ? v[i + n] : v[i], sent = is_upper ? v[i] : v[i + n];
      v[i] = both(kept, __shfl_xor_sync(~0u, sent, 4 * n));
    }
  }
  v[0] = both(v[0], __shfl_xor_sync(~0u, v[0], 2));
  return both(v[0], __shfl_xor_sync(~0u, v[0], 1));
}
// What the lanes of token i have.
__device__ __forceinline__ float of_row(float x, int i, int lane) {
  return __shfl_sync(~0u, x, (lane & ~(LANES - 1)) | 4 * i);
}
__device__ __forceinline__ float2 widen(uint16_t pair) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
}

// Values of rows: `codes` and `scales` of this head.
__device__ __forceinline__ void load_rows(const uint8_t* codes, const uint8_t* scales, const Place& at,
                                          float (&x)[TOKENS][OWN]) {
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    const int token = at.token(i);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      float* to = &x[i][4 * c];
      const int first = token * HEAD_DIM + at.chunk(c) * 4;
      if constexpr (FROM == FP8) {
        uint32_t word;
        load_words<1>(codes + first, &word);
        const float2 a = widen((uint16_t)word), b = widen((uint16_t)(word >> 16));
        to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
      } else {
        uint32_t words[2];
        load_words<2>(codes + first * 2, words);
#pragma unroll
        for (int k = 0; k < 2; k++) {
          if constexpr (FROM == F16) {
            const float2 f = unpack_half2(words[k]);
            to[2 * k] = f.x, to[2 * k + 1] = f.y;
          } else {
            to[2 * k] = __uint_as_float(words[k] << 16), to[2 * k + 1] = __uint_as_float(words[k] & 0xFFFF0000u);
          }
        }
      }
    }
  }
  if constexpr (FROM == FP8) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      const float scale = __half2float(reinterpret_cast<const __half*>(scales)[at.token(i)]);
#pragma unroll
      for (int e = 0; e < OWN; e++) x[i][e] *= scale;
    }
  }
}

__device__ __forceinline__ void store_rows(const float (&x)[TOKENS][OWN], const Place& at, uint8_t* codes,
                                           uint8_t* scales) {
  float row_scale = 1.f, row_inverse = 1.f;
  if constexpr (TO == FP8) {
    float largest[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      largest[i] = 0.f;
#pragma unroll
      for (int e = 0; e < OWN; e++) largest[i] = fmaxf(largest[i], fabsf(x[i][e]));
    }
    const __half stored = __float2half_rn(fmaxf(reduce_rows<true>(largest, at.lane) / E4M3_MAX, MIN_SCALE));
    row_scale = __half2float(stored), row_inverse = 1.f / row_scale;
    if (at.lane % 4 == 0) reinterpret_cast<__half*>(scales)[at.token(at.lane % LANES / 4)] = stored;
  }
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    const int token = at.token(i);
    float scale = 1.f, inverse = 1.f;
    if constexpr (TO == FP8) scale = of_row(row_scale, i, at.lane), inverse = of_row(row_inverse, i, at.lane);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const float* from = &x[i][4 * c];
      uint8_t* to = codes + (token * HEAD_DIM + at.chunk(c) * 4) * (TO == FP8 ? 1 : 2);
      if constexpr (TO == FP8) {
        float y[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {  // a quotient rounded once; zero keeps its sign
          const float q = from[e] * inverse;
          y[e] = copysignf(fmaf(fmaf(-q, scale, from[e]), inverse, q), from[e]);
        }
        const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(y[0], y[1]), __NV_SATFINITE, __NV_E4M3);
        const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(y[2], y[3]), __NV_SATFINITE, __NV_E4M3);
        *reinterpret_cast<uint32_t*>(to) = low | high << 16;
      } else if constexpr (TO == F16) {
        *reinterpret_cast<uint2*>(to) = make_uint2(pack_half2(from[0], from[1]), pack_half2(from[2], from[3]));
      } else {
        const __nv_bfloat162 a = __floats2bfloat162_rn(from[0], from[1]), b = __floats2bfloat162_rn(from[2], from[3]);
        *reinterpret_cast<uint2*>(to) =
            make_uint2(*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b));
      }
    }
  }
}

// Codes in fragment order from or to words in shared memory, a group of 32 codes per lane and warp.
template <int BITS, bool IS_VALUE>
__device__ __forceinline__ void words_to_codes(const uint32_t* words, uint8_t* codes, const Place& at) {
  for (int group = at.warp; group < HEAD_DIM / 16; group += WARPS) {
    uint32_t r[8], w[BITS];
#pragma unroll
    for (int i = 0; i < 8; i++) r[i] = words[register_at<IS_VALUE>(group, i, at.lane)];
    pack<BITS>(r, w);
#pragma unroll
    for (int u = 0; u < BITS; u++) *reinterpret_cast<uint32_t*>(codes + word_at<BITS>(group, u, at.lane)) = w[u];
  }
}
template <int BITS, bool IS_VALUE>
__device__ __forceinline__ void codes_to_levels(const uint8_t* codes, uint32_t* words, const Place& at) {
  for (int group = at.warp; group < HEAD_DIM / 16; group += WARPS) {
    uint32_t r[8], w[BITS];
#pragma unroll
    for (int u = 0; u < BITS; u++) w[u] = *reinterpret_cast<const uint32_t*>(codes + word_at<BITS>(group, u, at.lane));
    unpack_levels<BITS>(w, r);
#pragma unroll
    for (int i = 0; i < 8; i++) words[register_at<IS_VALUE>(group, i, at.lane)] = r[i];
  }
}

template <int BITS, bool IS_VALUE>
__device__ __forceinline__ void load_tq(const uint8_t* share, uint32_t* words, const Place& at, float (&x)[TOKENS][OWN]) {
  codes_to_levels<BITS, IS_VALUE>(share + (IS_VALUE ? From::V : 0), words, at);
  __syncthreads();
  if constexpr (IS_VALUE) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int e = 0; e < 4; e++)
#pragma unroll
        for (int i = 0; i < TOKENS; i += 4) {
          const uint32_t levels = words[(at.chunk(c) * 4 + e) * V_ROW + at.group(i)];
#pragma unroll
          for (int t = 0; t < 4; t++) x[i + t][4 * c + e] = level_of<BITS>(levels, t);
        }
  } else {
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        const uint32_t levels = words[at.token(i) * K_ROW + at.chunk(c)];
#pragma unroll
        for (int e = 0; e < 4; e++) x[i][4 * c + e] = level_of<BITS>(levels, e);
      }
  }
  const __half* scales = reinterpret_cast<const __half*>(share + (IS_VALUE ? From::V_SCALES : From::K_SCALES));
  const uint2* means = reinterpret_cast<const uint2*>(share + From::MEAN);
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    const float scale = __half2float(scales[scale_at(at.token(i))]);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
      for (int e = 0; e < 4; e++) x[i][4 * c + e] *= scale;
      if constexpr (!IS_VALUE && FROM_CENTRED) {
        const uint2 m = means[at.chunk(c)];
        const float2 a = unpack_half2(m.x), b = unpack_half2(m.y);
        x[i][4 * c] += a.x, x[i][4 * c + 1] += a.y, x[i][4 * c + 2] += b.x, x[i][4 * c + 3] += b.y;
      }
    }
  }
  __syncthreads();  // the words are used again
}

// Subtracts the mean of the page's keys, as it is stored.
__device__ __forceinline__ void centre(float (&x)[TOKENS][OWN], float (*sums)[HEAD_DIM], uint8_t* mean, const Place& at) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < TOKENS; i++) sum += x[i][4 * c + e];
#pragma unroll
      for (int o = LANES; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
      if (at.part == 0) sums[at.warp][at.chunk(c) * 4 + e] = sum;
    }
  __syncthreads();
  for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[w][d];
    const __half stored = __float2half_rn(sum * (1.f / PAGE));
    reinterpret_cast<__half*>(mean)[d] = stored;
    sums[0][d] = __half2float(stored);
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float m = sums[0][at.chunk(c) * 4 + e];
#pragma unroll
      for (int i = 0; i < TOKENS; i++) x[i][4 * c + e] -= m;
    }
}

template <int BITS, bool IS_VALUE>
__device__ __forceinline__ void store_tq(const float (&x)[TOKENS][OWN], uint32_t* words, uint8_t* share, const Place& at) {
  uint32_t groups[TOKENS / 4][OWN];  // of V: four tokens of a channel
  float squares[TOKENS], chosen[TOKENS];
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    squares[i] = 0.f;
#pragma unroll
    for (int e = 0; e < OWN; e++) squares[i] = fmaf(x[i][e], x[i][e], squares[i]);
  }
  const float norm = sqrtf(reduce_rows<false>(squares, at.lane)), root_mean_square = norm / sqrtf((float)HEAD_DIM);
  const float row_inverse = 1.f / fmaxf(root_mean_square, TINY);
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    const float inverse = of_row(row_inverse, i, at.lane);
    chosen[i] = 0.f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      uint32_t codes = BELOW<BITS>;
      auto quantised = [&](auto place, float value, uint32_t& word) {
        const float level = quantise<BITS, decltype(place)::value>(value * inverse, word);
        chosen[i] = fmaf(level, level, chosen[i]);
      };
      const float* from = &x[i][4 * c];
      if constexpr (IS_VALUE) {
        uint32_t* word = &groups[i / 4][4 * c];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (i % 4 == 0) word[e] = BELOW<BITS>;
          if (i % 4 == 0) quantised(Byte<0>(), from[e], word[e]);
          else if (i % 4 == 1) quantised(Byte<1>(), from[e], word[e]);
          else if (i % 4 == 2) quantised(Byte<2>(), from[e], word[e]);
          else quantised(Byte<3>(), from[e], word[e]);
        }
      } else {
        quantised(Byte<0>(), from[0], codes), quantised(Byte<1>(), from[1], codes);
        quantised(Byte<2>(), from[2], codes), quantised(Byte<3>(), from[3], codes);
        words[at.token(i) * K_ROW + at.chunk(c)] = codes;
      }
    }
  }
  float scale = root_mean_square;
  if constexpr (BITS > 2) scale = norm / fmaxf(sqrtf(reduce_rows<false>(chosen, at.lane)), TINY);
  if (at.lane % 4 == 0)
    reinterpret_cast<__half*>(share + (IS_VALUE ? To::V_SCALES : To::K_SCALES))[scale_at(at.token(at.lane % LANES / 4))] =
        __float2half_rn(fminf(scale, HALF_MAX));
  if constexpr (IS_VALUE)
#pragma unroll
    for (int e = 0; e < OWN; e++)
#pragma unroll
      for (int i = 0; i < TOKENS / 4; i++) words[(at.chunk(e / 4) * 4 + e % 4) * V_ROW + at.group(4 * i)] = groups[i][e];
  __syncthreads();
  words_to_codes<BITS, IS_VALUE>(words, share + (IS_VALUE ? To::V : 0), at);
  __syncthreads();
}

// Where a KV head's K or V lies in row order.
struct Rows {
  uint8_t *codes, *scales;
};

// K or V of a KV head. What is TQ lies in shares; `words` and `sums` are scratch.
template <bool IS_VALUE>
__device__ __forceinline__ void convert(const Rows& from, const Rows& to, const uint8_t* from_share, uint8_t* to_share,
                                        uint32_t* words, float (*sums)[HEAD_DIM], const Place& at) {
  float x[TOKENS][OWN];
  if constexpr (FROM == TQ) load_tq<IS_VALUE ? FROM_V_BITS : FROM_K_BITS, IS_VALUE>(from_share, words, at, x);
  else load_rows(from.codes, from.scales, at, x);
  if constexpr (TO == TQ) {
    if constexpr (!IS_VALUE && TO_CENTRED) centre(x, sums, to_share + To::MEAN, at);
    store_tq<IS_VALUE ? TO_V_BITS : TO_K_BITS, IS_VALUE>(x, words, to_share, at);
  } else {
    store_rows(x, at, to.codes, to.scales);
  }
}

// Brings a TQ share to shared memory.
__device__ __forceinline__ void load_share(const uint8_t* source, uint4* share) {
  const auto* from = reinterpret_cast<const uint4*>(source);
  for (int i = threadIdx.x; i < From::BYTES / 16; i += THREADS) share[i] = load_here(from + i);
  __syncthreads();
}

constexpr int FROM_SIZE = FROM == FP8 ? 1 : 2, TO_SIZE = TO == FP8 ? 1 : 2;  // bytes of a value in row order
