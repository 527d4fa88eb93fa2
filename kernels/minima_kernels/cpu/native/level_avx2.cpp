// AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

#include "levels.h"
#include "tables.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")

#define INLINE inline __attribute__((always_inline))

namespace minima {
namespace avx2 {
namespace {

#define LANES 8
#include "simd.h"

INLINE float sum(VF v) {
  const __m256 x = reinterpret_cast<__m256>(v);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
INLINE int32_t sum(VI v) {
  const __m256i x = reinterpret_cast<__m256i>(v);
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
INLINE float maximum(VF v) {
  const __m256 x = reinterpret_cast<__m256>(v);
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
INLINE VF vmax(VF a, VF b) {
  return reinterpret_cast<VF>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
}
INLINE VI lane_numbers() { return VI{0, 1, 2, 3, 4, 5, 6, 7}; }
INLINE VI round_to_int(VF v) {
  return reinterpret_cast<VI>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(v)));
}
// Sixteen numbers below 2**15 as pairs (i, i + 8).
INLINE void store_pairs(int32_t* p, const VI v[2]) { store(p, v[0] | v[1] << 16); }
INLINE VF load_halves(const uint8_t* p) {
  return reinterpret_cast<VF>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
INLINE VI dot(VI total, VS a, VS b) {
  return wrapping_add(total, reinterpret_cast<VI>(_mm256_madd_epi16(
                                 reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b))));
}

#include "tile.h"
#include "unpack.inl"
#include "x86.inl"
#include "products.inl"
#include "attend.inl"
#include "encode.inl"

}  // namespace
}  // namespace avx2

const Level avx2_level = {"avx2", sizeof(avx2::Scratch), avx2::quantise, avx2::attend, avx2::append, avx2::retier};

}  // namespace minima

#pragma GCC pop_options
#endif
