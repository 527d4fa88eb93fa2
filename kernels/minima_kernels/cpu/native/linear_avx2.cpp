// Linear layers with AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

#include "linear.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")

#define INLINE inline __attribute__((always_inline))

namespace minima {
namespace avx2 {
namespace {

#include "linear_rows.inl"
#include "linear_x86.inl"

INLINE __m256i broadcast(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}
INLINE __m256 halves(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Sums must be taken one after another in a register: regrouped, they do not fit in the registers.
INLINE void keep(__m256i& sum) { asm("" : "+x"(sum)); }

// Integer products of ROWS rows with the two halves of a panel, 8 outputs each; of one block.
template <int ROWS>
struct Dots {
  __m256i of[ROWS][2];

  INLINE Dots() {
    for (int r = 0; r < ROWS; ++r) of[r][0] = of[r][1] = _mm256_setzero_si256();
  }
};

// Results of ROWS rows for a panel.
template <int ROWS, typename Block>
struct Results {
  const Block* x[ROWS];
  __m256 of[ROWS][2];

  INLINE Results(const PanelJob& job, int64_t first) {
    for (int r = 0; r < ROWS; ++r) {
      x[r] = row_of<Block>(job, first + r);
      of[r][0] = of[r][1] = _mm256_setzero_ps();
    }
  }

  template <bool MINIMA>
  INLINE void add(const PanelJob& job, int64_t b, const Dots<ROWS>& dots) {
    for (int h = 0; h < 2; ++h) {
      const int64_t place = 2 * (b * kPanel + 8 * h);
      const __m256 scale = halves(job.scales + place);
      const __m256 minimum = MINIMA ? halves(job.minima + place) : scale;
      for (int r = 0; r < ROWS; ++r) {
        const __m256 value =
            _mm256_mul_ps(_mm256_cvtepi32_ps(dots.of[r][h]), _mm256_set1_ps(x[r][b].scale));
        of[r][h] = _mm256_fmadd_ps(value, scale, of[r][h]);
        if (MINIMA) of[r][h] = _mm256_fmadd_ps(_mm256_set1_ps(x[r][b].sum), minimum, of[r][h]);
      }
    }
  }

  INLINE void store(const PanelJob& job, int64_t first) const {
    for (int r = 0; r < ROWS; ++r)
      for (int h = 0; h < 2; ++h)
        _mm256_storeu_ps(job.out + (first + r) * job.out_stride + 8 * h, of[r][h]);
  }
};

// Unsigned 4-bit times signed 8-bit: a block's sum of products stays below 2**15, in 16-bit lanes.
template <int ROWS>
void q4_8_rows(const PanelJob& job, int64_t first) {
  const __m256i nibble = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
  Results<ROWS, Block8> results(job, first);
  for (int64_t b = 0; b < job.blocks; ++b) {
    const uint8_t* codes = job.codes + b * (kBlock * kPanel / 2);
    if (first == 0) prefetch<20 * kPanel>(job, b);
    Dots<ROWS> dots;
    for (int q = 0; q < 4; ++q)
      for (int late = 0; late < 2; ++late) {
        __m256i w[2];
        for (int h = 0; h < 2; ++h) {
          const __m256i packed = load256(codes + 64 * q + 32 * h);
          w[h] = _mm256_and_si256(late ? _mm256_srli_epi16(packed, 4) : packed, nibble);
        }
        for (int r = 0; r < ROWS; ++r) {
          const __m256i four = broadcast(results.x[r][b].codes + 4 * q + 16 * late);
          for (int h = 0; h < 2; ++h) {
            __m256i& dot = dots.of[r][h];
            dot = _mm256_add_epi16(dot, _mm256_maddubs_epi16(w[h], four));
            keep(dot);
          }
        }
      }
    for (int r = 0; r < ROWS; ++r)
      for (int h = 0; h < 2; ++h) dots.of[r][h] = _mm256_madd_epi16(dots.of[r][h], one);
    results.template add<true>(job, b, dots);
  }
  results.store(job, first);
}

// Pairs of weights in 16 bits times pairs of activations: w holds, of every output, the inputs that
// `pair` has.
template <int ROWS>
INLINE void multiply_pair(const __m256i w[2], const Block16* const x[ROWS], int64_t b, int pair,
                          Dots<ROWS>& dots) {
  for (int r = 0; r < ROWS; ++r) {
    const __m256i two = broadcast(x[r][b].codes + 2 * pair);
    for (int h = 0; h < 2; ++h) {
      __m256i& dot = dots.of[r][h];
      dot = _mm256_add_epi32(dot, _mm256_madd_epi16(w[h], two));
      keep(dot);
    }
  }
}

template <int ROWS>
void q4_16_rows(const PanelJob& job, int64_t first) {
  const __m256i nibble = _mm256_set1_epi16(15);
  Results<ROWS, Block16> results(job, first);
  for (int64_t b = 0; b < job.blocks; ++b) {
    const uint8_t* codes = job.codes + b * (kBlock * kPanel / 2);
    if (first == 0) prefetch<20 * kPanel>(job, b);
    Dots<ROWS> dots;
    for (int q = 0; q < 4; ++q)
      for (int late = 0; late < 2; ++late)
        for (int odd = 0; odd < 2; ++odd) {
          __m256i w[2];
          for (int h = 0; h < 2; ++h) {
            const __m256i packed = load256(codes + 64 * q + 32 * h);
            w[h] = _mm256_and_si256(_mm256_srli_epi16(packed, 4 * late + 8 * odd), nibble);
          }
          multiply_pair<ROWS>(w, results.x, b, 2 * q + 8 * late + odd, dots);
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
    for (int q = 0; q < 8; ++q)
      for (int odd = 0; odd < 2; ++odd) {
        __m256i w[2];
        for (int h = 0; h < 2; ++h) {
          const __m256i packed = load256(codes + 64 * q + 32 * h);
          w[h] = _mm256_srai_epi16(odd ? packed : _mm256_slli_epi16(packed, 8), 8);
        }
        multiply_pair<ROWS>(w, results.x, b, 2 * q + odd, dots);
      }
    results.template add<false>(job, b, dots);
  }
  results.store(job, first);
}

#define BY_FOUR(name)                                                     \
  void name(const PanelJob& job) {                                        \
    int64_t row = 0;                                                      \
    for (; row + 4 <= job.rows; row += 4) name##_rows<4>(job, row);       \
    switch (job.rows - row) {                                             \
      case 3: name##_rows<3>(job, row); break;                            \
      case 2: name##_rows<2>(job, row); break;                            \
      case 1: name##_rows<1>(job, row); break;                            \
      default: break;                                                     \
    }                                                                     \
  }
BY_FOUR(q4_8)
BY_FOUR(q4_16)
BY_FOUR(q8_16)

}  // namespace
}  // namespace avx2

const LinearLevel avx2_linear = {avx2::normalise, avx2::gate,  avx2::round8, avx2::round16,
                                 avx2::q4_8,      avx2::q4_16, avx2::q8_16};

}  // namespace minima

#pragma GCC pop_options
#endif
