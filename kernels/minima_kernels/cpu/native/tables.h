// Codebooks and word tables of every level count, registered once by the Python side.
#pragma once
#include <cstdint>

namespace minima {

constexpr int kMaxLevels = 16;
// Centroids are signed bytes; tables hold them as unsigned distances from the lowest, so that a
// byte shuffle gives zero-extended 16-bit lanes. The lowest is -kBias for every level count.
constexpr int kBias = 127;

// Constants of words.inl. A step is one word, or two words of at most three codes.
struct WordSteps {
  alignas(32) int8_t shuffle[32] = {};  // the bytes of a lane's step; lanes 4-7: from step_bits / 2 on
  alignas(32) int32_t shift[8] = {};
  alignas(32) int8_t order[32] = {};    // digits 0 1 3 4 2 - 5 - of two steps, put in order
  int codes = 0;
  int bits = 0;
  uint32_t radix = 0;  // of the lower half of a step of one word; 0 if there are two
};

// How `levels` codes are packed: `codes` digits in base `levels` share a word of `bits` bits.
struct LevelTable {
  int levels = 0;
  int codes = 0;
  int bits = 0;
  float step = 0;                // centroid = signed byte * step
  uint8_t bytes[kMaxLevels] = {};  // centroid byte + kBias
  float boundaries[kMaxLevels] = {};  // levels - 1 of them, ascending
  bool planar = false;           // a power of two: words are plain bit fields
  // Otherwise codes are looked up a step at a time: one word, or two small ones. A large word is
  // split in low and high digits: low = word % radix, high = word / radix.
  int step_codes = 0;
  int step_bits = 0;
  int low_codes = 0;
  uint32_t radix = 0;
  uint64_t reciprocal = 0;       // 2**32 / radix, rounded up: exact for words of 18 bits
  uint8_t (*low)[8] = nullptr;   // one row per step, or per low part
  uint8_t (*high)[8] = nullptr;  // null when all digits are low
  WordSteps steps;
};

const LevelTable& level_table(int levels);
bool register_levels(int levels, int codes, int bits, float step, const int8_t* centroids,
                     const float* boundaries);

}  // namespace minima
