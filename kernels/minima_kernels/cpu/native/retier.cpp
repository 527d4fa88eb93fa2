// Writing pages: rows of new tokens, and whole pages from one format to another.
#include <cstring>

#include "exports.h"
#include "pool.h"
#include "workspace.h"

using namespace minima;

void minima_append(const MinimaFormat* format, const MinimaGeometry* geometry, const float* k,
                   const float* v, uint8_t* arena, const int64_t* shares, const int64_t* slots,
                   int64_t num_tokens, int threads) {
  const Level& level = current_level();
  const int64_t width = geometry->kv_heads * geometry->head_dim;
  // Waking a thread costs about as much as a few dozen rows.
  constexpr int64_t kRows = 64;
  parallel_for((num_tokens + kRows - 1) / kRows, threads, [&](int64_t block, int) {
    const int64_t last = (block + 1) * kRows < num_tokens ? (block + 1) * kRows : num_tokens;
    for (int64_t i = block * kRows; i < last; ++i)
      level.append(*format, *geometry, k + i * width, v + i * width, slots[i], arena + shares[i]);
  });
}

void minima_retier(const MinimaFormat* from, const MinimaFormat* to, const int64_t* share_bytes,
                   const uint8_t* copied, int64_t num_layers, const MinimaGeometry* geometry, uint8_t* arena,
                   const int64_t* sources, const int64_t* targets, int64_t num_pages,
                   int threads) {
  const Level& level = current_level();
  parallel_for(num_pages * num_layers, threads, [&](int64_t index, int) {
    const int64_t page = index / num_layers, layer = index % num_layers;
    const uint8_t* source = arena + sources[page];
    uint8_t* target = arena + targets[page];
    // Every share starts with its K codes.
    if (copied[layer]) {
      std::memcpy(target + to[layer].k_codes, source + from[layer].k_codes, share_bytes[layer]);
      return;
    }
    std::memset(target + to[layer].k_codes, 0, share_bytes[layer]);
    // Rows in the queries' buffer, bytes in that of the outputs (four times what they need).
    Workspace& space = workspace();
    space.reserve(level, geometry->page_size + 1, geometry->head_dim);
    auto* bytes = reinterpret_cast<uint8_t*>(space.out);
    for (int head = 0; head < geometry->kv_heads; ++head)
      level.retier(from[layer], to[layer], *geometry, head, source, target, space.q, bytes);
  });
}
