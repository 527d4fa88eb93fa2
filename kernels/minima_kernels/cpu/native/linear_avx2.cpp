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

// Unsigned 4-bit times signed 8-bit: sums of 16 products stay below 2**15, so a whole block is
// summed in 16 bits. PLANES is 2 where activations have a low byte too.
template <int ROWS, int PLANES>
INLINE void q4_rows(const PanelJob& job, int64_t first) {
  const __m256i nibble = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
  const __m256i high_weight = _mm256_set1_epi16(PLANES == 2 ? 256 : 1);
  const BytesBlock* x[ROWS];
  __m256 sums[ROWS][2];
  for (int r = 0; r < ROWS; ++r) {
    x[r] = row_of<BytesBlock>(job, first + r);
    for (int h = 0; h < 2; ++h) sums[r][h] = _mm256_setzero_ps();
  }
  for (int64_t b = 0; b < job.blocks; ++b) {
    const uint8_t* codes = job.codes + b * (kBlock * kPanel / 2);
    if (ROWS <= 2) prefetch<20 * kPanel>(job, b);
    __m256i dots[PLANES][ROWS][2];
    for (int p = 0; p < PLANES; ++p)
      for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) dots[p][r][h] = _mm256_setzero_si256();
    for (int q = 0; q < 4; ++q) {
      for (int late = 0; late < 2; ++late) {
        __m256i w[2];
        for (int h = 0; h < 2; ++h) {
          const __m256i packed = load256(codes + 64 * q + 32 * h);
          w[h] = _mm256_and_si256(late ? _mm256_srli_epi16(packed, 4) : packed, nibble);
        }
        for (int r = 0; r < ROWS; ++r)
          for (int p = 0; p < PLANES; ++p) {
            const int8_t* plane = p ? x[r][b].low : x[r][b].high;
            const __m256i four = broadcast(plane + 4 * q + 16 * late);
            for (int h = 0; h < 2; ++h) {
              dots[p][r][h] = _mm256_add_epi16(dots[p][r][h], _mm256_maddubs_epi16(w[h], four));
              keep(dots[p][r][h]);
            }
          }
      }
    }
    for (int h = 0; h < 2; ++h) {
      const __m256 scale = halves(job.scales + 2 * (b * kPanel + 8 * h));
      const __m256 minimum = halves(job.minima + 2 * (b * kPanel + 8 * h));
      for (int r = 0; r < ROWS; ++r) {
        __m256i dot = _mm256_madd_epi16(dots[0][r][h], high_weight);
        if (PLANES == 2)
          dot = _mm256_add_epi32(dot, _mm256_madd_epi16(dots[PLANES - 1][r][h], one));
        const __m256 value =
            _mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(x[r][b].scale));
        sums[r][h] = _mm256_fmadd_ps(value, scale, sums[r][h]);
        sums[r][h] = _mm256_fmadd_ps(_mm256_set1_ps(x[r][b].sum), minimum, sums[r][h]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int h = 0; h < 2; ++h)
      _mm256_storeu_ps(job.out + (first + r) * job.out_stride + 8 * h, sums[r][h]);
}

template <int ROWS>
INLINE void q8_rows(const PanelJob& job, int64_t first) {
  const WordsBlock* x[ROWS];
  __m256 sums[ROWS][2];
  for (int r = 0; r < ROWS; ++r) {
    x[r] = row_of<WordsBlock>(job, first + r);
    for (int h = 0; h < 2; ++h) sums[r][h] = _mm256_setzero_ps();
  }
  for (int64_t b = 0; b < job.blocks; ++b) {
    const uint8_t* codes = job.codes + b * (kBlock * kPanel);
    if (ROWS <= 2) prefetch<34 * kPanel>(job, b);
    __m256i dots[ROWS][2];
    for (int r = 0; r < ROWS; ++r)
      for (int h = 0; h < 2; ++h) dots[r][h] = _mm256_setzero_si256();
    for (int q = 0; q < 8; ++q) {
      __m256i even[2], odd[2];
      for (int h = 0; h < 2; ++h) {
        const __m256i packed = load256(codes + 64 * q + 32 * h);
        even[h] = _mm256_srai_epi16(_mm256_slli_epi16(packed, 8), 8);
        odd[h] = _mm256_srai_epi16(packed, 8);
      }
      for (int r = 0; r < ROWS; ++r) {
        const __m256i x_even = broadcast(x[r][b].codes + 4 * q);
        const __m256i x_odd = broadcast(x[r][b].codes + 4 * q + 2);
        for (int h = 0; h < 2; ++h) {
          dots[r][h] = _mm256_add_epi32(dots[r][h], _mm256_madd_epi16(even[h], x_even));
          keep(dots[r][h]);
          dots[r][h] = _mm256_add_epi32(dots[r][h], _mm256_madd_epi16(odd[h], x_odd));
          keep(dots[r][h]);
        }
      }
    }
    for (int h = 0; h < 2; ++h) {
      const __m256 scale = halves(job.scales + 2 * (b * kPanel + 8 * h));
      for (int r = 0; r < ROWS; ++r) {
        const __m256 value =
            _mm256_mul_ps(_mm256_cvtepi32_ps(dots[r][h]), _mm256_set1_ps(x[r][b].scale));
        sums[r][h] = _mm256_fmadd_ps(value, scale, sums[r][h]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int h = 0; h < 2; ++h)
      _mm256_storeu_ps(job.out + (first + r) * job.out_stride + 8 * h, sums[r][h]);
}

void q4_8(const PanelJob& job) {
  int64_t row = 0;
  for (; row + 4 <= job.rows; row += 4) q4_rows<4, 1>(job, row);
  switch (job.rows - row) {
    case 3: q4_rows<3, 1>(job, row); break;
    case 2: q4_rows<2, 1>(job, row); break;
    case 1: q4_rows<1, 1>(job, row); break;
    default: break;
  }
}

void q4_16(const PanelJob& job) {
  int64_t row = 0;
  for (; row + 2 <= job.rows; row += 2) q4_rows<2, 2>(job, row);
  if (row < job.rows) q4_rows<1, 2>(job, row);
}

void q8(const PanelJob& job) {
  int64_t row = 0;
  for (; row + 4 <= job.rows; row += 4) q8_rows<4>(job, row);
  switch (job.rows - row) {
    case 3: q8_rows<3>(job, row); break;
    case 2: q8_rows<2>(job, row); break;
    case 1: q8_rows<1>(job, row); break;
    default: break;
  }
}

}  // namespace
}  // namespace avx2

const LinearLevel avx2_linear = {avx2::normalise,  avx2::gate,     avx2::to_bytes8,
                                 avx2::to_bytes16, avx2::to_words, avx2::q4_8,
                                 avx2::q4_16,      avx2::q8};

}  // namespace minima

#pragma GCC pop_options
#endif
