// The kernels of one instruction-set level, and the choice of a level at run time.
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.h"

namespace minima {

// Rows of query heads that share one KV head, and their running softmax in base 2.
struct AttendJob {
  const MinimaGeometry* geometry;
  int head;
  int rows;
  const float* q;          // [rows, D], scaled by scale * log2(e)
  const int16_t* q16;      // [rows, D], the same in integers of q_step
  const float* q_step;     // [rows]
  const int32_t* q_start;  // [rows], what undoes the bias of centroids in a product
  float* out;              // [rows, D], unnormalised
  float* max;              // [rows]
  float* sum;              // [rows]
  float* page_sums;        // [pages, rows] log2 of each page's sum; null if not wanted
  // Rows are queries of consecutive tokens (`group` rows each) and attend causally to a single page
  // that holds these tokens: places of the first and the last in it. -1: no mask.
  int64_t first_token, last_token;
};

struct Level {
  const char* name;
  size_t scratch_bytes;
  void (*quantise)(const float* q, int dim, int16_t* q16, float* step, int32_t* start);
  // Attends to consecutive pages of one format; `position` counts pages before them in the sequence.
  void (*attend)(const AttendJob& job, const MinimaFormat& format, const uint8_t* arena,
                 const int64_t* pages, int64_t num_pages, int last_len, int64_t position,
                 void* scratch);
  // Writes one token into `slot` of a layer's share of a page; offsets of `format` start there.
  void (*append)(const MinimaFormat& format, const MinimaGeometry& geometry, const float* k,
                 const float* v, int64_t slot, uint8_t* share);
  // Re-encodes one head of one layer of a page; see encode.inl for the scratch.
  void (*retier)(const MinimaFormat& from, const MinimaFormat& to, const MinimaGeometry& geometry,
                 int head, const uint8_t* source, uint8_t* target, float* rows, uint8_t* bytes);
};

extern const Level portable_level;
#if defined(__x86_64__)
extern const Level avx2_level;
extern const Level avx512_level;
#endif

// The best level of this machine, or the one that `force_level` chose.
const Level& current_level();
// False if there is no such level or the machine lacks it; an empty name undoes a choice.
bool force_level(const char* name);
bool machine_has(const char* name);

}  // namespace minima
