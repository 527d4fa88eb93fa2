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
  float scale, sum;
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
    const float scaled = step.inverse == 0 ? 0 : x[i] * step.inverse;
    rounded.codes[i] = static_cast<int32_t>(std::lrintf(scaled));
    total += rounded.codes[i];
  }
  rounded.scale = step.scale;
  rounded.sum = step.scale * static_cast<float>(total);
  return rounded;
}

void round8(const float* x, int64_t blocks, Block8* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    const Rounded rounded = round_block(x + b * kBlock, kLimit8);
    for (int i = 0; i < kBlock; ++i) out[b].codes[i] = static_cast<int8_t>(rounded.codes[i]);
    out[b].scale = rounded.scale;
    out[b].sum = rounded.sum;
  }
}

void round16(const float* x, int64_t blocks, Block16* out) {
  static const int order[] = {0, 2, 1, 3};
  for (int64_t b = 0; b < blocks; ++b) {
    const Rounded rounded = round_block(x + b * kBlock, kLimit16);
    for (int i = 0; i < kBlock; ++i)
      out[b].codes[i] = static_cast<int16_t>(rounded.codes[i / 4 * 4 + order[i % 4]]);
    out[b].scale = rounded.scale;
    out[b].sum = rounded.sum;
  }
}

INLINE float half_at(const uint8_t* p, int64_t index) {
  uint16_t bits;
  __builtin_memcpy(&bits, p + 2 * index, 2);
  return half_to_float(bits);
}

// The codes of a block's activations in the order of the inputs.
INLINE void in_order(const Block8& block, int32_t* codes) {
  for (int i = 0; i < kBlock; ++i) codes[i] = block.codes[i];
}
INLINE void in_order(const Block16& block, int32_t* codes) {
  for (int i = 0; i < kBlock; i += 4) {
    codes[i] = block.codes[i];
    codes[i + 1] = block.codes[i + 2];
    codes[i + 2] = block.codes[i + 1];
    codes[i + 3] = block.codes[i + 3];
  }
}

template <typename Block>
void q4(const PanelJob& job) {
  for (int64_t row = 0; row < job.rows; ++row) {
    const Block* x = row_of<Block>(job, row);
    float sums[kPanel] = {};
    for (int64_t b = 0; b < job.blocks; ++b) {
      const uint8_t* codes = job.codes + b * (kBlock * kPanel / 2);
      int32_t x_codes[kBlock], dots[kPanel] = {};
      in_order(x[b], x_codes);
      for (int q = 0; q < 4; ++q)
        for (int o = 0; o < kPanel; ++o)
          for (int j = 0; j < 4; ++j) {
            const int32_t code = codes[64 * q + 4 * o + j];
            dots[o] += (code & 15) * x_codes[4 * q + j] + (code >> 4) * x_codes[4 * q + j + 16];
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

void q8_16(const PanelJob& job) {
  for (int64_t row = 0; row < job.rows; ++row) {
    const Block16* x = row_of<Block16>(job, row);
    float sums[kPanel] = {};
    for (int64_t b = 0; b < job.blocks; ++b) {
      const int8_t* codes = reinterpret_cast<const int8_t*>(job.codes + b * (kBlock * kPanel));
      int32_t x_codes[kBlock], dots[kPanel] = {};
      in_order(x[b], x_codes);
      for (int q = 0; q < 8; ++q)
        for (int o = 0; o < kPanel; ++o)
          for (int j = 0; j < 4; ++j) dots[o] += codes[64 * q + 4 * o + j] * x_codes[4 * q + j];
      for (int o = 0; o < kPanel; ++o)
        sums[o] += static_cast<float>(dots[o]) * x[b].scale * half_at(job.scales, b * kPanel + o);
    }
    for (int o = 0; o < kPanel; ++o) job.out[row * job.out_stride + o] = sums[o];
  }
}

}  // namespace
}  // namespace portable

const LinearLevel portable_linear = {
    portable::normalise,  portable::gate,        portable::round8, portable::round16,
    portable::q4<Block8>, portable::q4<Block16>, portable::q8_16};

}  // namespace minima
