// Codebooks and word tables of every level count, registered once by the Python side.
#pragma once
#include <cstdint>

namespace minima {

constexpr int kMaxLevels = 16;
// Centroids are signed bytes; tables hold them as unsigned distances from the lowest, so that a
// byte shuffle gives zero-extended 16-bit lanes. The lowest is -kBias for every level count.
constexpr int kBias = 127;

// How `levels` codes are packed: `codes` digits in base `levels` share a word of `bits` bits.
struct LevelTable {
  int levels = 0;
  int codes = 0;
  int bits = 0;
  float step = 0;                // centroid = signed byte * step
  uint8_t bytes[kMaxLevels] = {};  // centroid byte + kBias
  float boundaries[kMaxLevels] = {};  // levels - 1 of them, ascending
  bool planar = false;           // a power of two: words are plain bit fields
  // Otherwise a word is split in low and high digits: low = word % radix, high = word / radix.
  int low_codes = 0;
  uint32_t radix = 0;
  uint8_t (*low)[8] = nullptr;
  uint8_t (*high)[8] = nullptr;  // null when all digits are low
};

const LevelTable& level_table(int levels);
bool register_levels(int levels, int codes, int bits, float step, const int8_t* centroids,
                     const float* boundaries);

}  // namespace minima
