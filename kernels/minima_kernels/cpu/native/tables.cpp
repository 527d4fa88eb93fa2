#include "tables.h"

#include <mutex>

namespace minima {
namespace {

LevelTable tables[kMaxLevels + 1];
std::mutex tables_mutex;

// Above this many bits one table per word would not stay in the second-level cache.
constexpr int kMaxTableBits = 14;

uint8_t (*digit_table(const LevelTable& table, uint32_t words, int digits))[8] {
  auto* rows = new uint8_t[words][8]();
  for (uint32_t word = 0; word < words; ++word) {
    uint32_t rest = word;
    for (int digit = 0; digit < digits; ++digit) {
      rows[word][digit] = table.bytes[rest % table.levels];
      rest /= table.levels;
    }
  }
  return rows;
}

}  // namespace

const LevelTable& level_table(int levels) { return tables[levels]; }

bool register_levels(int levels, int codes, int bits, float step, const int8_t* centroids,
                     const float* boundaries) {
  if (levels < 2 || levels > kMaxLevels || codes < 1 || bits < 1 || bits > 18) return false;
  std::lock_guard<std::mutex> lock(tables_mutex);
  LevelTable& table = tables[levels];
  if (table.levels) return true;
  table.codes = codes;
  table.bits = bits;
  table.step = step;
  for (int i = 0; i < levels; ++i) table.bytes[i] = static_cast<uint8_t>(centroids[i] + kBias);
  for (int i = 0; i + 1 < levels; ++i) table.boundaries[i] = boundaries[i];
  table.planar = (levels & (levels - 1)) == 0;
  table.levels = levels;
  if (table.planar) return true;
  if (codes > 8) return table.levels = 0, false;
  table.low_codes = bits <= kMaxTableBits ? codes : codes / 2;
  table.radix = 1;
  for (int i = 0; i < table.low_codes; ++i) table.radix *= levels;
  if (table.low_codes == codes) {
    table.radix = 1u << bits;
    table.low = digit_table(table, table.radix, codes);
  } else {
    table.low = digit_table(table, table.radix, table.low_codes);
    table.high = digit_table(table, (1u << bits) / table.radix + 1, codes - table.low_codes);
  }
  return true;
}

}  // namespace minima
