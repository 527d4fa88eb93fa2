// Linear layers with AVX-512 and VNNI: a panel's 16 outputs are one vector.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

#include "linear.h"

// The intrinsics' own headers start from a vector of anything.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")

#define INLINE inline __attribute__((always_inline))

namespace minima {
namespace avx512 {
namespace {

#include "linear_rows.inl"
#include "linear_x86.inl"

INLINE __m512i broadcast(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}
INLINE __m512 halves(const uint8_t* p) { return _mm512_cvtph_ps(load256(p)); }

// PLANES is 2 where activations have a low byte too. Two sums per row and plane, for inputs 0 to 15
// and 16 to 31, so that products need not wait for each other.
template <int ROWS, int PLANES>
INLINE void q4_rows(const PanelJob& job, int64_t first) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const BytesBlock* x[ROWS];
  __m512 sums[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    x[r] = row_of<BytesBlock>(job, first + r);
    sums[r] = _mm512_setzero_ps();
  }
  for (int64_t b = 0; b < job.blocks; ++b) {
    const uint8_t* codes = job.codes + b * (kBlock * kPanel / 2);
    if (ROWS <= 2) prefetch<20 * kPanel>(job, b);
    __m512i dots[PLANES][ROWS][2];
    for (int p = 0; p < PLANES; ++p)
      for (int r = 0; r < ROWS; ++r)
        dots[p][r][0] = dots[p][r][1] = _mm512_setzero_si512();
    for (int q = 0; q < 4; ++q) {
      const __m512i packed = _mm512_loadu_si512(codes + 64 * q);
      const __m512i low = _mm512_and_si512(packed, nibble);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
      for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PLANES; ++p) {
          const int8_t* plane = p ? x[r][b].low : x[r][b].high;
          __m512i* dot = dots[p][r];
          dot[0] = _mm512_dpbusd_epi32(dot[0], low, broadcast(plane + 4 * q));
          dot[1] = _mm512_dpbusd_epi32(dot[1], high, broadcast(plane + 4 * q + 16));
        }
    }
    const __m512 scale = halves(job.scales + 2 * b * kPanel);
    const __m512 minimum = halves(job.minima + 2 * b * kPanel);
    for (int r = 0; r < ROWS; ++r) {
      __m512i dot = _mm512_add_epi32(dots[0][r][0], dots[0][r][1]);
      if (PLANES == 2)
        dot = _mm512_add_epi32(
            _mm512_slli_epi32(dot, 8),
            _mm512_add_epi32(dots[PLANES - 1][r][0], dots[PLANES - 1][r][1]));
      const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(x[r][b].scale));
      sums[r] = _mm512_fmadd_ps(value, scale, sums[r]);
      sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[r][b].sum), minimum, sums[r]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    _mm512_storeu_ps(job.out + (first + r) * job.out_stride, sums[r]);
}

template <int ROWS>
INLINE void q8_rows(const PanelJob& job, int64_t first) {
  const WordsBlock* x[ROWS];
  __m512 sums[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    x[r] = row_of<WordsBlock>(job, first + r);
    sums[r] = _mm512_setzero_ps();
  }
  for (int64_t b = 0; b < job.blocks; ++b) {
    const uint8_t* codes = job.codes + b * (kBlock * kPanel);
    if (ROWS <= 2) prefetch<34 * kPanel>(job, b);
    __m512i dots[ROWS][2];
    for (int r = 0; r < ROWS; ++r) dots[r][0] = dots[r][1] = _mm512_setzero_si512();
    for (int q = 0; q < 8; ++q) {
      const __m512i packed = _mm512_loadu_si512(codes + 64 * q);
      const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(packed, 8), 8);
      const __m512i odd = _mm512_srai_epi16(packed, 8);
      for (int r = 0; r < ROWS; ++r) {
        const int16_t* four = x[r][b].codes + 4 * q;
        dots[r][0] = _mm512_dpwssd_epi32(dots[r][0], even, broadcast(four));
        dots[r][1] = _mm512_dpwssd_epi32(dots[r][1], odd, broadcast(four + 2));
      }
    }
    const __m512 scale = halves(job.scales + 2 * b * kPanel);
    for (int r = 0; r < ROWS; ++r) {
      const __m512i dot = _mm512_add_epi32(dots[r][0], dots[r][1]);
      const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(x[r][b].scale));
      sums[r] = _mm512_fmadd_ps(value, scale, sums[r]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    _mm512_storeu_ps(job.out + (first + r) * job.out_stride, sums[r]);
}

void q4_8(const PanelJob& job) {
  int64_t row = 0;
  for (; row + 6 <= job.rows; row += 6) q4_rows<6, 1>(job, row);
  for (; row + 2 <= job.rows; row += 2) q4_rows<2, 1>(job, row);
  if (row < job.rows) q4_rows<1, 1>(job, row);
}

void q4_16(const PanelJob& job) {
  int64_t row = 0;
  for (; row + 4 <= job.rows; row += 4) q4_rows<4, 2>(job, row);
  for (; row + 2 <= job.rows; row += 2) q4_rows<2, 2>(job, row);
  if (row < job.rows) q4_rows<1, 2>(job, row);
}

void q8(const PanelJob& job) {
  int64_t row = 0;
  for (; row + 6 <= job.rows; row += 6) q8_rows<6>(job, row);
  for (; row + 2 <= job.rows; row += 2) q8_rows<2>(job, row);
  if (row < job.rows) q8_rows<1>(job, row);
}

}  // namespace
}  // namespace avx512

const LinearLevel avx512_linear = {avx512::normalise,  avx512::gate,     avx512::to_bytes8,
                                 avx512::to_bytes16, avx512::to_words, avx512::q4_8,
                                 avx512::q4_16,      avx512::q8};

}  // namespace minima

#pragma GCC pop_options
#endif
