#include "tables.h"

#include <cstring>
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

uint8_t (*pair_table(const LevelTable& table))[8] {
  const uint32_t words = 1u << table.bits;
  auto* single = digit_table(table, words, table.codes);
  auto* rows = new uint8_t[words * words][8]();
  for (uint32_t pair = 0; pair < words * words; ++pair) {
    std::memcpy(rows[pair], single[pair % words], table.codes);
    std::memcpy(rows[pair] + table.codes, single[pair / words], table.codes);
  }
  delete[] single;
  return rows;
}

WordSteps word_steps(int levels, int codes, int bits) {
  WordSteps steps;
  const bool two_words = codes <= 3;
  steps.codes = two_words ? 2 * codes : codes;
  steps.bits = two_words ? 2 * bits : bits;
  if (!two_words) steps.radix = levels * levels * (codes == 4 ? 1 : levels);
  for (int lane = 0; lane < 8; ++lane) {
    const int bit = lane % 4 * steps.bits + (lane < 4 ? 0 : 4 * steps.bits % 8);
    for (int i = 0; i < 4; ++i) steps.shuffle[4 * lane + i] = static_cast<int8_t>(bit / 8 + i);
    steps.shift[lane] = bit % 8;
  }
  static const int8_t digits[] = {0, 1, 4, 2, 3, 6};
  for (int i = 0; i < 32; ++i) {
    const int step = i % 16 / steps.codes;
    steps.order[i] = static_cast<int8_t>(step < 2 ? 8 * step + digits[i % 16 % steps.codes] : -128);
  }
  return steps;
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
  // The vectors' halves of at most three digits; packing.py has no others.
  if (codes < 2 || codes > 6 || (codes == 2 && bits > 8)) return table.levels = 0, false;
  table.steps = word_steps(levels, codes, bits);
  const bool pairs = 2 * bits <= kMaxTableBits && 2 * codes <= 8;
  table.step_codes = pairs ? 2 * codes : codes;
  table.step_bits = pairs ? 2 * bits : bits;
  table.low_codes = bits <= kMaxTableBits ? codes : codes / 2;
  table.radix = 1;
  for (int i = 0; i < table.low_codes; ++i) table.radix *= levels;
  table.reciprocal = (1ull << 32) / table.radix + 1;
  if (pairs) {
    table.low = pair_table(table);
  } else if (table.low_codes == codes) {
    table.low = digit_table(table, 1u << bits, codes);
  } else {
    table.low = digit_table(table, table.radix, table.low_codes);
    table.high = digit_table(table, (1u << bits) / table.radix + 1, codes - table.low_codes);
  }
  return true;
}

}  // namespace minima
