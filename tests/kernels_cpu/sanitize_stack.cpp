// A decode step through two layers at the level in use, on panels and pages that end where their
// memory does: the same bits on one thread and on three; sanitize.cpp calls it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "stack.h"

namespace {

constexpr int64_t kWidth = 128, kInner = 160, kRows = 2, kPage = 16, kDim = 32;
constexpr int kHeads = 2, kGroup = 2;
constexpr int64_t kPageBytes = 2 * 2 * kHeads * kPage * kDim * sizeof(float);  // two layers

std::mt19937 generator(5);

std::vector<float> normal(int64_t count, float size) {
  std::normal_distribution<float> law(0, size);
  std::vector<float> values(count);
  for (float& value : values) value = law(generator);
  return values;
}

struct Matrix {
  Matrix(int64_t outputs, int64_t inputs) {
    const int64_t panels = (outputs + 15) / 16, codes = inputs / 32 * 512;
    const int64_t stride = (codes + inputs / 32 * 32 + 63) / 64 * 64;
    data.reset(new uint8_t[panels * stride]);
    for (int64_t i = 0; i < panels * stride; ++i)  // float16 scales of about 2**-10
      data[i] = i % stride < codes ? static_cast<uint8_t>(generator()) : i % 2 ? 0x14 : 0x11;
    native = {kQ8, 16, outputs, inputs, data.get(), nullptr};
  }

  std::unique_ptr<uint8_t[]> data;
  MinimaMatrix native;
};

std::vector<float> step(const MinimaStack& stack, MinimaStep step, const std::vector<float>& x,
                        int threads) {
  const std::unique_ptr<uint8_t[]> arena(new uint8_t[kRows * kPageBytes]);
  std::memset(arena.get(), 0, kRows * kPageBytes);
  step.arena = arena.get();
  std::vector<float> hidden = x;
  minima_decode_layers(&stack, &step, hidden.data(), threads);
  return hidden;
}

}  // namespace

void check_stack() {
  const Matrix qkv((kGroup + 2) * kHeads * kDim, kWidth), output(kWidth, kGroup * kHeads * kDim);
  const Matrix gate_up(2 * kInner, kWidth), down(kWidth, kInner);
  const std::vector<float> weight = normal(kWidth, 1), head_weight = normal(kDim, 1);
  const MinimaInput norm = {kNormed, 1e-5f, weight.data()};
  const MinimaLayer layer = {&qkv.native,  &output.native,     &gate_up.native,    &down.native, &norm,
                             &norm,        head_weight.data(), head_weight.data(), 1e-5f,        0};
  const MinimaLayer layers[] = {layer, layer};
  const std::vector<float> rotary = normal(kDim / 2, 1);
  const MinimaStack stack = {layers, 2, &norm, rotary.data(), 1, 0};

  MinimaFormat shares[2] = {};
  for (int i = 0; i < 2; ++i) {
    MinimaFormat& share = shares[i];
    share.type = kF32;
    share.k_scales = share.v_scales = share.k_mean = -1;
    share.k_codes_head = share.v_codes_head = kPage * kDim * sizeof(float);
    share.k_codes = i * kPageBytes / 2;
    share.v_codes = share.k_codes + kHeads * share.k_codes_head;
  }
  const MinimaFormat* formats[] = {shares, shares + 1};
  const MinimaGeometry geometry = {kHeads, kGroup, kDim, kPage};
  const int64_t pages[] = {0, kPageBytes}, ends[] = {0, 1, 2}, numbers[] = {0, 1}, slots[] = {2, 15};
  const int32_t kinds[] = {0, 0}, last[] = {3, 16}, ones[] = {1, 1};
  const MinimaDecodePlan plan = {kRows, 2,    2,       pages,   ends,    kinds, last,
                                 numbers, ones, numbers, numbers, numbers, ends,  numbers};
  const MinimaStep described = {&plan, &geometry, formats, shares, pages, slots,
                                slots, nullptr,   kDim,    0.2f,   0};
  const std::vector<float> x = normal(kRows * kWidth, 1);
  const std::vector<float> alone = step(stack, described, x, 1);
  for (const float value : alone)
    if (!std::isfinite(value)) std::abort();
  if (step(stack, described, x, 3) != alone) {
    std::printf("stack: other bits on three threads\n");
    std::exit(1);
  }
}
