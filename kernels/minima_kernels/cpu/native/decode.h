// Decode attention without page mass, for callers within the extension.
#pragma once
#include <cstdint>

#include "abi.h"

namespace minima {

// `minima_decode` where threads pay from `thread_reads` tokens on, counted once per KV head.
// page_sums: [entries, Hq] log2 of what the pages add up to, or null.
void decode(const MinimaDecodePlan& plan, const MinimaGeometry& geometry,
            const MinimaFormat* formats, const float* q, const uint8_t* arena, float scale,
            float* partials, float* out, float* lse, float* page_sums, int threads,
            int64_t thread_reads);

}  // namespace minima
