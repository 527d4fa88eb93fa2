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

INLINE VI lane_numbers() { return VI{0, 1, 2, 3, 4, 5, 6, 7}; }
INLINE VHalf narrow(VI v) {
  const __m256i wide = reinterpret_cast<__m256i>(v);
  return reinterpret_cast<VHalf>(
      _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}
INLINE VI dot(VI total, VS a, VS b) {
  return total + reinterpret_cast<VI>(
      _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}

#include "tile.h"
#include "unpack.inl"
#include "x86.inl"
#include "attend.inl"

}  // namespace
}  // namespace avx2

const Level avx2_level = {"avx2", sizeof(avx2::Scratch), avx2::quantise, avx2::attend};

}  // namespace minima

#pragma GCC pop_options
#endif
