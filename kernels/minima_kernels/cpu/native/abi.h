// Structures that cross the C boundary; minima_kernels/cpu/abi.py declares the same fields.
#pragma once
#include <cstdint>

extern "C" {

enum FormatType : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kFP8 = 3, kTQ = 4 };

// Where one layer's share of a page keeps its parts: byte offsets from the start of the page, and
// bytes from one KV head to the next. A part that the format lacks has offset -1.
struct MinimaFormat {
  int32_t type;
  int32_t k_levels;
  int32_t v_levels;
  int32_t padding;
  int64_t k_codes, k_scales, k_mean, v_codes, v_scales;
  int64_t k_codes_head, k_scales_head, k_mean_head, v_codes_head, v_scales_head;
};

struct MinimaGeometry {
  int32_t kv_heads;
  int32_t group;  // query heads per KV head
  int32_t head_dim;
  int32_t page_size;
};

// One decode batch, prepared once for all layers. An item is a run of pages of one segment; work
// is shared out by (item, KV head). Item i writes the partials item_partial[i] .. of its readers,
// and, where asked, the page sums item_entry[i] .. (page major, then reader).
struct MinimaDecodePlan {
  int64_t num_rows, num_items, num_partials;
  const int64_t* pages;        // byte offsets in the arena
  const int64_t* item_page;    // [items + 1]
  const int32_t* item_kind;    // [items]
  const int32_t* item_last;    // [items] valid tokens of the item's last page
  const int64_t* item_reader;  // [items] first index into readers
  const int32_t* item_readers; // [items] number of readers
  const int64_t* item_partial; // [items]
  const int64_t* item_entry;   // [items]
  const int64_t* readers;      // query rows
  const int64_t* row_partial;  // [rows + 1], into row_partials
  const int64_t* row_partials;
};

// One extend batch: request i has query rows q_indptr[i] .. q_indptr[i + 1] and reads the runs
// run_indptr[i] .. run_indptr[i + 1] of consecutive pages of one kind, in order of position.
struct MinimaExtendPlan {
  int64_t num_requests;
  const int64_t* q_indptr;    // [requests + 1]
  const int64_t* run_indptr;  // [requests + 1]
  const int64_t* run_page;    // [runs + 1]
  const int32_t* run_kind;    // [runs]
  const int32_t* run_last;    // [runs] valid tokens of the run's last page
  const int64_t* pages;       // byte offsets in the arena
};

}  // extern "C"
