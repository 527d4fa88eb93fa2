// The level that every machine has.
#include <cmath>

#include "levels.h"
#include "tables.h"

#define INLINE inline __attribute__((always_inline))

namespace minima {
namespace portable {
namespace {

#define LANES 4
#include "simd.h"

INLINE float sum(VF v) { return (v[0] + v[1]) + (v[2] + v[3]); }
INLINE int32_t sum(VI v) { return (v[0] + v[1]) + (v[2] + v[3]); }
INLINE float maximum(VF v) {
  const float low = v[0] > v[1] ? v[0] : v[1], high = v[2] > v[3] ? v[2] : v[3];
  return low > high ? low : high;
}
INLINE VF vmax(VF a, VF b) { return a > b ? a : b; }
INLINE VI lane_numbers() { return VI{0, 1, 2, 3}; }
INLINE VI round_to_int(VF v) { return to_int(v + (v < VF{} ? splat(-0.5f) : splat(0.5f))); }
// Sixteen numbers below 2**15 as pairs (i, i + 8).
INLINE void store_pairs(int32_t* p, const VI v[4]) {
  store(p, v[0] | v[2] << 16);
  store(p + 4, v[1] | v[3] << 16);
}
INLINE VF load_halves(const uint8_t* p) {
  uint16_t halves[LANES];
  __builtin_memcpy(halves, p, sizeof halves);
  VF x;
  for (int i = 0; i < LANES; ++i) x[i] = half_to_float(halves[i]);
  return x;
}
INLINE VI dot(VI total, VS a, VS b) {
  const VI x = reinterpret_cast<VI>(a), y = reinterpret_cast<VI>(b);
  const VI low_x = reinterpret_cast<VI>(reinterpret_cast<VU>(x) << 16) >> 16;
  const VI low_y = reinterpret_cast<VI>(reinterpret_cast<VU>(y) << 16) >> 16;
  return wrapping_add(total, wrapping_add(low_x * low_y, (x >> 16) * (y >> 16)));
}

#include "tile.h"
#include "unpack.inl"
#include "scalar.inl"
#include "products.inl"
#include "attend.inl"
#include "encode.inl"

}  // namespace
}  // namespace portable

const Level portable_level = {"portable", sizeof(portable::Scratch), portable::quantise,
                              portable::attend, portable::append, portable::retier};

}  // namespace minima
