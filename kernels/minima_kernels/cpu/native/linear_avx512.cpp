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

// Integer products of ROWS rows with a panel, of one block: two sums each, which add up to the
// product, so that instructions need not wait for each other.
template <int ROWS>
struct Dots {
  __m512i of[ROWS][2];

  INLINE Dots() {
    for (int r = 0; r < ROWS; ++r) of[r][0] = of[r][1] = _mm512_setzero_si512();
  }
};

// Results of ROWS rows for a panel.
template <int ROWS, typename Block>
struct Results {
  const Block* x[ROWS];
  __m512 of[ROWS];

  INLINE Results(const PanelJob& job, int64_t first) {
    for (int r = 0; r < ROWS; ++r) {
      x[r] = row_of<Block>(job, first + r);
      of[r] = _mm512_setzero_ps();
    }
  }

  template <bool MINIMA>
  INLINE void add(const PanelJob& job, int64_t b, const Dots<ROWS>& dots) {
    const __m512 scale = halves(job.scales + 2 * b * kPanel);
    const __m512 minimum = MINIMA ? halves(job.minima + 2 * b * kPanel) : scale;
    for (int r = 0; r < ROWS; ++r) {
      const __m512i dot = _mm512_add_epi32(dots.of[r][0], dots.of[r][1]);
      const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(x[r][b].scale));
      of[r] = _mm512_fmadd_ps(value, scale, of[r]);
      if (MINIMA) of[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[r][b].sum), minimum, of[r]);
    }
  }

  INLINE void store(const PanelJob& job, int64_t first) const {
    for (int r = 0; r < ROWS; ++r)
      _mm512_storeu_ps(job.out + (first + r) * job.out_stride, of[r]);
  }
};

template <int ROWS>
void q4_8_rows(const PanelJob& job, int64_t first) {
  const __m512i nibble = _mm512_set1_epi8(15);
  Results<ROWS, Block8> results(job, first);
  for (int64_t b = 0; b < job.blocks; ++b) {
    const uint8_t* codes = job.codes + b * (kBlock * kPanel / 2);
    if (first == 0) prefetch<20 * kPanel>(job, b);
    Dots<ROWS> dots;
    for (int q = 0; q < 4; ++q) {
      const __m512i packed = _mm512_loadu_si512(codes + 64 * q);
      const __m512i early = _mm512_and_si512(packed, nibble);
      const __m512i late = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
      for (int r = 0; r < ROWS; ++r) {
        const int8_t* x = results.x[r][b].codes + 4 * q;
        dots.of[r][0] = _mm512_dpbusd_epi32(dots.of[r][0], early, broadcast(x));
        dots.of[r][1] = _mm512_dpbusd_epi32(dots.of[r][1], late, broadcast(x + 16));
      }
    }
    results.template add<true>(job, b, dots);
  }
  results.store(job, first);
}

template <int ROWS>
void q4_16_rows(const PanelJob& job, int64_t first) {
  const __m512i nibble = _mm512_set1_epi16(15);
  Results<ROWS, Block16> results(job, first);
  for (int64_t b = 0; b < job.blocks; ++b) {
    const uint8_t* codes = job.codes + b * (kBlock * kPanel / 2);
    if (first == 0) prefetch<20 * kPanel>(job, b);
    Dots<ROWS> dots;
    for (int q = 0; q < 4; ++q) {
      const __m512i packed = _mm512_loadu_si512(codes + 64 * q);
      for (int late = 0; late < 2; ++late)
        for (int odd = 0; odd < 2; ++odd) {
          const __m512i w =
              _mm512_and_si512(_mm512_srli_epi16(packed, 4 * late + 8 * odd), nibble);
          for (int r = 0; r < ROWS; ++r) {
            const int16_t* two = results.x[r][b].codes + 4 * q + 16 * late + 2 * odd;
            dots.of[r][odd] = _mm512_dpwssd_epi32(dots.of[r][odd], w, broadcast(two));
          }
        }
    }
    results.template add<true>(job, b, dots);
  }
  results.store(job, first);
}

template <int ROWS>
void q8_16_rows(const PanelJob& job, int64_t first) {
  Results<ROWS, Block16> results(job, first);
  for (int64_t b = 0; b < job.blocks; ++b) {
    const uint8_t* codes = job.codes + b * (kBlock * kPanel);
    if (first == 0) prefetch<34 * kPanel>(job, b);
    Dots<ROWS> dots;
    for (int q = 0; q < 8; ++q) {
      const __m512i packed = _mm512_loadu_si512(codes + 64 * q);
      for (int odd = 0; odd < 2; ++odd) {
        const __m512i w = _mm512_srai_epi16(odd ? packed : _mm512_slli_epi16(packed, 8), 8);
        for (int r = 0; r < ROWS; ++r) {
          const int16_t* two = results.x[r][b].codes + 4 * q + 2 * odd;
          dots.of[r][odd] = _mm512_dpwssd_epi32(dots.of[r][odd], w, broadcast(two));
        }
      }
    }
    results.template add<false>(job, b, dots);
  }
  results.store(job, first);
}

#define BY_SIX(name)                                                \
  void name(const PanelJob& job) {                                  \
    int64_t row = 0;                                                \
    for (; row + 6 <= job.rows; row += 6) name##_rows<6>(job, row); \
    for (; row + 2 <= job.rows; row += 2) name##_rows<2>(job, row); \
    if (row < job.rows) name##_rows<1>(job, row);                   \
  }
BY_SIX(q4_8)
BY_SIX(q4_16)
BY_SIX(q8_16)

}  // namespace
}  // namespace avx512

const LinearLevel avx512_linear = {avx512::normalise, avx512::gate,  avx512::round8,
                                   avx512::round16,   avx512::q4_8,  avx512::q4_16,
                                   avx512::q8_16};

}  // namespace minima

#pragma GCC pop_options
#endif
