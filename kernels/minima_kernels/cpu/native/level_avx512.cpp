// AVX-512 with VNNI: products on 512-bit vectors, expansion on 256-bit ones.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

#include "levels.h"
#include "tables.h"

// The intrinsics' own headers start from a vector of anything.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")

#define INLINE inline __attribute__((always_inline))

namespace minima {
namespace avx512 {
namespace {

#define LANES 16
#include "simd.h"

INLINE float sum(VF v) { return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v)); }
INLINE int32_t sum(VI v) { return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(v)); }
INLINE float maximum(VF v) { return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v)); }
INLINE VF vmax(VF a, VF b) {
  return reinterpret_cast<VF>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
}
INLINE VI lane_numbers() { return VI{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
INLINE VI round_to_int(VF v) {
  return reinterpret_cast<VI>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(v)));
}
// Sixteen numbers below 2**15 as pairs (i, i + 8).
INLINE void store_pairs(int32_t* p, const VI v[1]) {
  const __m512i wide = reinterpret_cast<__m512i>(v[0]);
  const __m256i high = _mm256_slli_epi32(_mm512_extracti64x4_epi64(wide, 1), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_or_si256(_mm512_castsi512_si256(wide), high));
}
INLINE VF load_halves(const uint8_t* p) {
  return reinterpret_cast<VF>(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
INLINE VI dot(VI total, VS a, VS b) {
  return reinterpret_cast<VI>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(total),
                                                  reinterpret_cast<__m512i>(a),
                                                  reinterpret_cast<__m512i>(b)));
}

#include "tile.h"
#include "unpack.inl"
#include "x86.inl"
#include "products.inl"
#include "attend.inl"
#include "encode.inl"

}  // namespace
}  // namespace avx512

const Level avx512_level = {"avx512", sizeof(avx512::Scratch), avx512::quantise, avx512::attend, avx512::append, avx512::retier};

}  // namespace minima

#pragma GCC pop_options
#endif
