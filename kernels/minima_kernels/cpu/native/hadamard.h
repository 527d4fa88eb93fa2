// The change of basis of all pages: normalised Hadamard blocks along the channels of a head.
#pragma once
#include <cstdint>

#include "exports.h"

extern "C" {

// x, out: float32 [rows, dim]; out = x times the block-diagonal Sylvester matrix of `block`, a power
// of two that divides dim, over sqrt(block). A row is the same bits whatever the other rows are.
MINIMA_EXPORT void minima_hadamard(const float* x, float* out, int64_t rows, int64_t dim,
                                   int64_t block, int threads);

}  // extern "C"
