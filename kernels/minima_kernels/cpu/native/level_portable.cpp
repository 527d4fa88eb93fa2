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

INLINE VI lane_numbers() { return VI{0, 1, 2, 3}; }
INLINE VHalf narrow(VI v) { return __builtin_convertvector(v, VHalf); }
INLINE VI dot(VI total, VS a, VS b) {
  const VI x = reinterpret_cast<VI>(a), y = reinterpret_cast<VI>(b);
  return total + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
}

#include "tile.h"
#include "unpack.inl"
#include "scalar.inl"
#include "attend.inl"

}  // namespace
}  // namespace portable

const Level portable_level = {"portable", sizeof(portable::Scratch), portable::quantise,
                              portable::attend};

}  // namespace minima
