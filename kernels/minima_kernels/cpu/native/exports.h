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

// q, out: float32 [rows, Hq, D]; lse: float32 [rows, Hq]; page_mass: float32 [entries, Hq] or null,
// entry_rows: the query row of each of its entries; partials: scratch of float32
// [num_partials, Hq, D + 2].
MINIMA_EXPORT void minima_decode(const MinimaDecodePlan* plan, const MinimaGeometry* geometry,
                                 const MinimaFormat* formats, const float* q, const uint8_t* arena,
                                 float scale, float* partials, float* out, float* lse,
                                 float* page_mass, const int64_t* entry_rows, int64_t num_entries,
                                 int threads);

// q, out: float32 [N, Hq, D]; kv: float32 [2, H, N, D], the new keys and values, and 15 rows of
// anything behind them; lse: float32 [N, Hq].
MINIMA_EXPORT void minima_extend(const MinimaExtendPlan* plan, const MinimaGeometry* geometry,
                                 const MinimaFormat* formats, const float* q, const float* kv,
                                 const uint8_t* arena, float scale, float* out, float* lse,
                                 int threads);

// k, v: float32 [N, H, D]; token i goes to slot slots[i] of the share at byte shares[i]. Offsets of
// `format` start at the share.
MINIMA_EXPORT void minima_append(const MinimaFormat* format, const MinimaGeometry* geometry,
                                 const float* k, const float* v, uint8_t* arena,
                                 const int64_t* shares, const int64_t* slots, int64_t num_tokens,
                                 int threads);

// Re-encodes pages, all layers: sources and targets are byte offsets of pages in the arena; `from`,
// `to`, the bytes of the target's share and whether it is to be copied as it is: one per layer.
MINIMA_EXPORT void minima_retier(const MinimaFormat* from, const MinimaFormat* to,
                                 const int64_t* share_bytes, const uint8_t* copied,
                                 int64_t num_layers,
                                 const MinimaGeometry* geometry, uint8_t* arena,
                                 const int64_t* sources, const int64_t* targets, int64_t num_pages,
                                 int threads);

}  // extern "C"
