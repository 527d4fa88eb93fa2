// Extend: several new tokens per request, over its cached pages and causally over each other.
//
// Work is shared out by (request, block of tokens, KV head). A block walks all pages of its request
// in order, so its result depends on nothing but them, and expands each tile once for all its rows.
#include <cmath>
#include <cstring>
#include <vector>

#include "exports.h"
#include "pool.h"
#include "workspace.h"

namespace minima {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// Queries of a block: with its outputs they stay in the second-level cache.
constexpr int kBlockValues = 16384;

struct Block {
  int64_t request, first, count;  // tokens, counted from the request's first
};

struct Extend {
  const MinimaExtendPlan& plan;
  const MinimaGeometry& geometry;
  const MinimaFormat* formats;
  const float *q, *new_keys, *new_values;
  const uint8_t* arena;
  float scale;
  float *out, *lse;

  void block(const Level& level, const Block& block, int head) const {
    const int dim = geometry.head_dim, group = geometry.group;
    const int64_t heads = geometry.kv_heads * group, num_rows = block.count * group;
    const int64_t token = plan.q_indptr[block.request] + block.first;
    Workspace& space = workspace();
    space.reserve(level, num_rows, dim);
    for (int64_t t = 0; t < block.count; ++t) {
      const float* source = q + ((token + t) * heads + head * group) * dim;
      float* target = space.q + t * group * dim;
      for (int j = 0; j < group * dim; ++j) target[j] = source[j] * (scale * kLog2E);
    }
    space.start(level, num_rows, dim);
    AttendJob job = space.job(geometry, head, num_rows);

    int64_t position = 0;
    const int64_t last_run = plan.run_indptr[block.request + 1];
    for (int64_t run = plan.run_indptr[block.request]; run < last_run; ++run) {
      const int64_t page = plan.run_page[run], count = plan.run_page[run + 1] - page;
      level.attend(job, formats[plan.run_kind[run]], arena, plan.pages + page, count,
                   plan.run_last[run], position, space.scratch);
      position += count;
    }
    attend_new(level, job, block, space.scratch);

    for (int64_t t = 0; t < block.count; ++t) {
      for (int j = 0; j < group; ++j) {
        const int64_t row = t * group + j, target = (token + t) * heads + head * group + j;
        const float inverse = 1.0f / space.sum[row];
        for (int d = 0; d < dim; ++d) out[target * dim + d] = space.out[row * dim + d] * inverse;
        lse[target] = (space.max[row] + std::log2(space.sum[row])) * kLn2;
      }
    }
  }

  // The new tokens are a page of their own, in float32, as long as they are many.
  void attend_new(const Level& level, AttendJob& job, const Block& block, void* scratch) const {
    const int64_t start = plan.q_indptr[block.request];
    const int64_t count = plan.q_indptr[block.request + 1] - start;
    const int64_t num_tokens = plan.q_indptr[plan.num_requests];
    const int64_t offset = (job.head * num_tokens + start) * geometry.head_dim;
    const auto* keys = reinterpret_cast<const uint8_t*>(new_keys + offset);
    const auto* values = reinterpret_cast<const uint8_t*>(new_values + offset);
    MinimaGeometry own = geometry;
    own.page_size = static_cast<int32_t>((count + 15) / 16 * 16);
    MinimaFormat format = {};
    format.type = kF32;
    format.k_scales = format.v_scales = format.k_mean = -1;
    format.v_codes = values - keys;
    job.geometry = &own;
    job.first_token = block.first;
    job.last_token = block.first + block.count - 1;
    const int64_t page = 0;
    level.attend(job, format, keys, &page, 1, static_cast<int>(count), 0, scratch);
  }
};

}  // namespace
}  // namespace minima

using namespace minima;

void minima_extend(const MinimaExtendPlan* plan, const MinimaGeometry* geometry,
                   const MinimaFormat* formats, const float* q, const float* kv,
                   const uint8_t* arena, float scale, float* out, float* lse, int threads) {
  const Level& level = current_level();
  const int64_t num_tokens = plan->q_indptr[plan->num_requests];
  const float* values = kv + geometry->kv_heads * num_tokens * geometry->head_dim;
  const Extend extend{*plan, *geometry, formats, q, kv, values, arena, scale, out, lse};
  int64_t size = kBlockValues / (geometry->head_dim * geometry->group);
  if (size < 1) size = 1;
  std::vector<Block> blocks;
  for (int64_t request = 0; request < plan->num_requests; ++request) {
    const int64_t count = plan->q_indptr[request + 1] - plan->q_indptr[request];
    for (int64_t first = 0; first < count; first += size)
      blocks.push_back({request, first, count - first < size ? count - first : size});
  }
  const int heads = geometry->kv_heads;
  parallel_for(static_cast<int64_t>(blocks.size()) * heads, threads, [&](int64_t index, int) {
    // The blocks of late tokens have most to do: take them first.
    const auto& block = blocks[blocks.size() - 1 - index / heads];
    extend.block(level, block, static_cast<int>(index % heads));
  });
}
