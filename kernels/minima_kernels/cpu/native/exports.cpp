#include "exports.h"

#include "levels.h"
#include "tables.h"

using namespace minima;

const char* minima_level() { return current_level().name; }
int minima_has_level(const char* name) { return machine_has(name); }
int minima_force_level(const char* name) { return force_level(name); }
int minima_register_levels(int levels, int codes, int bits, float step, const int8_t* centroids,
                           const float* boundaries) {
  return register_levels(levels, codes, bits, step, centroids, boundaries);
}
