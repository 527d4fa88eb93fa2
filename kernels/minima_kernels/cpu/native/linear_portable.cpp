// Linear layers at the level that every machine has.
#include <cmath>

#include "levels.h"
#include "linear.h"

#define INLINE inline __attribute__((always_inline))

namespace minima {
namespace portable {
namespace {

#include "half.inl"
#include "linear_rows.inl"

void normalise(const float* x, int64_t inputs, const float* weight, float eps, float* out) {
  float sums[4] = {};
  for (int64_t i = 0; i < inputs; i += 4)
    for (int j = 0; j < 4; ++j) sums[j] += x[i + j] * x[i + j];
  const float total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const float factor = 1 / std::sqrt(total / static_cast<float>(inputs) + eps);
  for (int64_t i = 0; i < inputs; ++i) out[i] = x[i] * factor * weight[i];
}

void gate(const float* x, int64_t inputs, float* out) {
  for (int64_t i = 0; i < inputs; ++i) out[i] = x[i] / (1 + std::exp(-x[i])) * x[inputs + i];
}

struct Rounded {
  int32_t codes[kBlock];
  float scale;
  float sum;
};

Rounded round_block(const float* x, float limit) {
  int32_t top = 0;
  for (int i = 0; i < kBlock; ++i) {
    int32_t bits;
    __builtin_memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  const Step step = step_of(top, limit);
  Rounded rounded;
  int32_t total = 0;
  for (int i = 0; i < kBlock; ++i) {
    rounded.codes[i] = step.inverse == 0 ? 0 : static_cast<int32_t>(std::lrintf(x[i] * step.inverse));
    total += rounded.codes[i];
  }
  rounded.scale = step.scale;
  rounded.sum = step.scale * static_cast<float>(total);
  return rounded;
}

template <int PLANES>
void to_bytes(const float* x, int64_t blocks, BytesBlock* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    const Rounded rounded = round_block(x + b * kBlock, PLANES == 2 ? kLimit16 : kLimit8);
    for (int i = 0; i < kBlock; ++i) {
      const int32_t code = rounded.codes[i];
      const int32_t low = PLANES == 2 ? static_cast<int8_t>(code & 255) : 0;
      out[b].low[i] = static_cast<int8_t>(low);
      out[b].high[i] = static_cast<int8_t>(PLANES == 2 ? (code - low) / 256 : code);
    }
    out[b].scale = rounded.scale;
    out[b].sum = rounded.sum;
  }
}

void to_words(const float* x, int64_t blocks, WordsBlock* out) {
  static const int order[] = {0, 2, 1, 3};
  for (int64_t b = 0; b < blocks; ++b) {
    const Rounded rounded = round_block(x + b * kBlock, kLimit16);
    for (int i = 0; i < kBlock; ++i)
      out[b].codes[i] = static_cast<int16_t>(rounded.codes[i / 4 * 4 + order[i % 4]]);
    out[b].scale = rounded.scale;
  }
}

INLINE float half_at(const uint8_t* p, int64_t index) {
  uint16_t bits;
  __builtin_memcpy(&bits, p + 2 * index, 2);
  return half_to_float(bits);
}

template <int PLANES>
void q4(const PanelJob& job) {
  for (int64_t row = 0; row < job.rows; ++row) {
    const BytesBlock* x = row_of<BytesBlock>(job, row);
    float sums[kPanel] = {};
    for (int64_t b = 0; b < job.blocks; ++b) {
      const uint8_t* codes = job.codes + b * (kBlock * kPanel / 2);
      int32_t wide[kBlock];
      for (int i = 0; i < kBlock; ++i)
        wide[i] = PLANES == 2 ? 256 * x[b].high[i] + x[b].low[i] : x[b].high[i];
      int32_t dots[kPanel] = {};
      for (int q = 0; q < 4; ++q)
        for (int o = 0; o < kPanel; ++o)
          for (int j = 0; j < 4; ++j) {
            const int32_t code = codes[64 * q + 4 * o + j];
            dots[o] += (code & 15) * wide[4 * q + j] + (code >> 4) * wide[4 * q + j + 16];
          }
      for (int o = 0; o < kPanel; ++o) {
        const float value = static_cast<float>(dots[o]) * x[b].scale;
        sums[o] += value * half_at(job.scales, b * kPanel + o);
        sums[o] += x[b].sum * half_at(job.minima, b * kPanel + o);
      }
    }
    for (int o = 0; o < kPanel; ++o) job.out[row * job.out_stride + o] = sums[o];
  }
}

void q8(const PanelJob& job) {
  for (int64_t row = 0; row < job.rows; ++row) {
    const WordsBlock* x = row_of<WordsBlock>(job, row);
    float sums[kPanel] = {};
    for (int64_t b = 0; b < job.blocks; ++b) {
      const int8_t* codes = reinterpret_cast<const int8_t*>(job.codes + b * (kBlock * kPanel));
      int32_t dots[kPanel] = {};
      for (int q = 0; q < 8; ++q) {
        const int16_t* four = x[b].codes + 4 * q;
        for (int o = 0; o < kPanel; ++o) {
          const int8_t* code = codes + 64 * q + 4 * o;
          dots[o] += code[0] * four[0] + code[2] * four[1] + code[1] * four[2] + code[3] * four[3];
        }
      }
      for (int o = 0; o < kPanel; ++o)
        sums[o] += static_cast<float>(dots[o]) * x[b].scale * half_at(job.scales, b * kPanel + o);
    }
    for (int o = 0; o < kPanel; ++o) job.out[row * job.out_stride + o] = sums[o];
  }
}

}  // namespace
}  // namespace portable

const LinearLevel portable_linear = {
    portable::normalise,   portable::gate,     portable::to_bytes<1>, portable::to_bytes<2>,
    portable::to_words,    portable::q4<1>,    portable::q4<2>,       portable::q8,
};

}  // namespace minima
