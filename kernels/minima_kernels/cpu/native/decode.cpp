// Decode: one query row per request; items in parallel, then the merge of each row's partials.
#include <cmath>
#include <cstring>
#include <vector>

#include "decode.h"
#include "exports.h"
#include "pool.h"
#include "workspace.h"

namespace minima {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// Tokens read per head that pay for waking a thread: some 100 us of work.
constexpr int64_t kSleepingReads = 1 << 13;

// Rows of an item are taken in blocks, so that a thread's buffers stay within the second-level
// cache however many requests share a segment.
constexpr int64_t kMaxRows = 512;

struct Decode {
  const MinimaDecodePlan& plan;
  const MinimaGeometry& geometry;
  const MinimaFormat* formats;
  const float* q;
  const uint8_t* arena;
  float scale;
  float* page_sums;    // [entries, Hq] log2, or null
  float* partial_max;  // [partials, Hq], base 2
  float* partial_sum;  // [partials, Hq]
  float* partial_out;  // [partials, Hq, D]

  void item(const Level& level, int64_t index, int head) const {
    const int group = geometry.group, dim = geometry.head_dim;
    const int64_t readers = plan.item_readers[index];
    const int64_t block = kMaxRows / group > 0 ? kMaxRows / group : 1;
    for (int64_t first = 0; first < readers; first += block) {
      const int64_t count = readers - first < block ? readers - first : block;
      rows(level, index, head, first, count, group, dim);
    }
  }

  void rows(const Level& level, int64_t index, int head, int64_t first, int64_t count, int group,
            int dim) const {
    const int64_t num_rows = count * group, heads = geometry.kv_heads * group;
    Workspace& space = workspace();
    space.reserve(level, num_rows, dim);
    const int64_t* readers = plan.readers + plan.item_reader[index] + first;
    for (int64_t i = 0; i < count; ++i) {
      const float* source = q + (readers[i] * heads + head * group) * dim;
      float* target = space.q + i * group * dim;
      for (int j = 0; j < group * dim; ++j) target[j] = source[j] * (scale * kLog2E);
    }
    space.start(level, num_rows, dim);
    AttendJob job = space.job(geometry, head, num_rows);
    const int64_t page = plan.item_page[index];
    const int64_t num_pages = plan.item_page[index + 1] - page;
    std::vector<float> sums;
    if (page_sums) {
      sums.assign(num_pages * num_rows, -INFINITY);
      job.page_sums = sums.data();
    }
    level.attend(job, formats[plan.item_kind[index]], arena, plan.pages + page, num_pages,
                 plan.item_last[index], 0, space.scratch);

    const int64_t partial = plan.item_partial[index] + first;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (partial + i) * heads + head * group;
      std::memcpy(partial_max + at, space.max + i * group, group * sizeof(float));
      std::memcpy(partial_sum + at, space.sum + i * group, group * sizeof(float));
      std::memcpy(partial_out + at * dim, space.out + i * group * dim,
                  sizeof(float) * group * dim);
    }
    if (!page_sums) return;
    const int64_t readers_all = plan.item_readers[index];
    for (int64_t p = 0; p < num_pages; ++p) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t entry = plan.item_entry[index] + p * readers_all + first + i;
        std::memcpy(page_sums + entry * heads + head * group,
                    sums.data() + p * num_rows + i * group, group * sizeof(float));
      }
    }
  }

  void merge(int64_t row, float* out, float* lse) const {
    const int dim = geometry.head_dim;
    const int64_t heads = geometry.kv_heads * geometry.group;
    const int64_t* first = plan.row_partials + plan.row_partial[row];
    const int64_t* last = plan.row_partials + plan.row_partial[row + 1];
    for (int64_t head = 0; head < heads; ++head) {
      float* o = out + (row * heads + head) * dim;
      std::memset(o, 0, dim * sizeof(float));
      float best = -INFINITY, total = 0;
      for (const int64_t* p = first; p < last; ++p)
        best = std::fmax(best, partial_max[*p * heads + head]);
      for (const int64_t* p = first; p < last; ++p) {
        const int64_t at = *p * heads + head;
        const float weight = std::exp2(partial_max[at] - best);
        total += weight * partial_sum[at];
        const float* part = partial_out + at * dim;
        for (int d = 0; d < dim; ++d) o[d] += weight * part[d];
      }
      lse[row * heads + head] = first < last ? (best + std::log2(total)) * kLn2 : -INFINITY;
      const float inverse = first < last ? 1.0f / total : 0.0f;
      for (int d = 0; d < dim; ++d) o[d] *= inverse;
    }
  }
};

}  // namespace

void decode(const MinimaDecodePlan& plan, const MinimaGeometry& geometry,
            const MinimaFormat* formats, const float* q, const uint8_t* arena, float scale,
            float* partials, float* out, float* lse, float* page_sums, int threads,
            int64_t thread_reads) {
  const Level& level = current_level();
  const int heads = geometry.kv_heads;
  const int64_t count = plan.num_partials * heads * geometry.group;
  const Decode decode{plan,     geometry,         formats,           q, arena, scale, page_sums,
                      partials, partials + count, partials + 2 * count};
  const int64_t read = plan.item_page[plan.num_items] * geometry.page_size * heads;
  parallel_for(plan.num_items * heads, read < thread_reads ? 1 : threads, [&](int64_t index, int) {
    decode.item(level, index / heads, static_cast<int>(index % heads));
  });
  // A partial costs about a token's work; small merges are not worth waking a thread.
  const int64_t work = count * geometry.head_dim;
  parallel_for(plan.num_rows, work < 1 << 17 ? 1 : threads,
               [&](int64_t row, int) { decode.merge(row, out, lse); });
}

}  // namespace minima

using namespace minima;

void minima_decode(const MinimaDecodePlan* plan, const MinimaGeometry* geometry,
                   const MinimaFormat* formats, const float* q, const uint8_t* arena, float scale,
                   float* partials, float* out, float* lse, float* page_mass,
                   const int64_t* entry_rows, int64_t num_entries, int threads) {
  decode(*plan, *geometry, formats, q, arena, scale, partials, out, lse, page_mass, threads,
         kSleepingReads);
  if (!page_mass) return;
  const int64_t query_heads = geometry->kv_heads * geometry->group;
  for (int64_t entry = 0; entry < num_entries; ++entry) {
    for (int64_t head = 0; head < query_heads; ++head) {
      float& mass = page_mass[entry * query_heads + head];
      mass = std::exp(mass * kLn2 - lse[entry_rows[entry] * query_heads + head]);
    }
  }
}
