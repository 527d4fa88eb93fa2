// The C interface of the extension; minima_kernels/cpu/native.py binds it.
#pragma once
#include <cstdint>

#include "abi.h"

#define MINIMA_EXPORT __attribute__((visibility("default")))

extern "C" {

// Name of the instruction-set level in use.
MINIMA_EXPORT const char* minima_level();
MINIMA_EXPORT int minima_has_level(const char* name);
MINIMA_EXPORT int minima_force_level(const char* name);
MINIMA_EXPORT int minima_register_levels(int levels, int codes, int bits, float step,
                                         const int8_t* centroids, const float* boundaries);

// q, out: float32 [rows, Hq, D]; lse: float32 [rows, Hq]; page_mass: float32 [entries, Hq] or null.
MINIMA_EXPORT void minima_decode(const MinimaDecodePlan* plan, const MinimaGeometry* geometry,
                                 const MinimaFormat* formats, const float* q, const uint8_t* arena,
                                 float scale, float* out, float* lse, float* page_mass,
                                 int threads);

}  // extern "C"
