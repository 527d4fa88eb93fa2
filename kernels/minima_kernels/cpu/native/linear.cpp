// Linear layers: rounding of activations, and the work shared out by panels.
#include "linear.h"

#include <algorithm>
#include <cstring>

#include "buffer.h"
#include "levels.h"
#include "pool.h"

#define INLINE inline __attribute__((always_inline))

namespace minima {
namespace {

#include "half.inl"

// Rounded rows that stay in the second-level cache while all panels go by.
constexpr int64_t kTileBytes = 192 << 10;
// Products that pay for waking up a thread.
constexpr int64_t kSleepingProducts = 2'000'000;
constexpr int64_t kTasksPerThread = 4;

const LinearLevel& current_linear() {
#if defined(__x86_64__)
  const Level* level = &current_level();
  if (level == &avx512_level) return avx512_linear;
  if (level == &avx2_level) return avx2_linear;
#endif
  return portable_linear;
}

struct Panels {
  explicit Panels(const MinimaMatrix& matrix)
      : blocks(matrix.inputs / kBlock),
        count((matrix.outputs + kPanel - 1) / kPanel),
        code_bytes(blocks * kBlock * kPanel / (matrix.kind == kQ4 ? 2 : 1)),
        scale_bytes(blocks * kPanel * 2),
        stride((code_bytes + scale_bytes * (matrix.kind == kQ4 ? 2 : 1) + 63) / 64 * 64) {}

  int64_t blocks, count, code_bytes, scale_bytes, stride;
};

thread_local Buffer rounded_rows, prepared_row;

struct Product {
  const MinimaMatrix& matrix;
  const MinimaInput& input;
  const LinearLevel& level;
  Panels panels;
  int64_t x_stride;
  uint8_t* x;
  const float* residual;
  float* out;

  void round_row(const float* all, int64_t row) const {
    const float* values = all + row * matrix.inputs * (input.kind == kGated ? 2 : 1);
    uint8_t* target = x + row * x_stride;
    if (input.kind != kPlain) {
      float* prepared = reinterpret_cast<float*>(prepared_row.reserve(matrix.inputs * 4));
      if (input.kind == kNormed)
        level.normalise(values, matrix.inputs, input.norm_weight, input.eps, prepared);
      else
        level.gate(values, matrix.inputs, prepared);
      values = prepared;
    }
    if (matrix.activation_bits == 8)
      level.round8(values, panels.blocks, reinterpret_cast<Block8*>(target));
    else
      level.round16(values, panels.blocks, reinterpret_cast<Block16*>(target));
  }

  void multiply(int64_t panel, int64_t first, int64_t rows) const {
    const uint8_t* codes = matrix.panels + panel * panels.stride;
    const int64_t output = panel * kPanel;
    const int64_t width = std::min<int64_t>(kPanel, matrix.outputs - output);
    PanelJob job = {codes,
                    codes + panels.code_bytes,
                    codes + panels.code_bytes + panels.scale_bytes,
                    panels.blocks,
                    x + first * x_stride,
                    x_stride,
                    rows,
                    out + first * matrix.outputs + output,
                    matrix.outputs};
    const auto run = matrix.kind == kQ8            ? level.q8_16
                     : matrix.activation_bits == 8 ? level.q4_8
                                                   : level.q4_16;
    if (width == kPanel) {
      run(job);
    } else {  // the last panel of a matrix whose outputs are no multiple of 16
      float* target = job.out;
      for (int64_t row = 0; row < rows; ++row) {
        float results[kPanel];
        job.rows = 1;
        job.x = x + (first + row) * x_stride;
        job.out = results;
        run(job);
        std::memcpy(target + row * matrix.outputs, results, width * sizeof(float));
      }
    }
    for (int64_t row = first; row < first + rows; ++row) {
      float* target = out + row * matrix.outputs;
      if (matrix.bias)
        for (int64_t i = output; i < output + width; ++i) target[i] += matrix.bias[i];
      if (residual)
        for (int64_t i = output; i < output + width; ++i)
          target[i] += residual[row * matrix.outputs + i];
    }
  }
};

}  // namespace

void multiply(const MinimaMatrix& matrix, const MinimaInput& input, const float* x,
              const float* residual, int64_t rows, float* out, int threads,
              int64_t thread_products) {
  const Panels panels(matrix);
  const int64_t block_bytes = matrix.activation_bits == 8 ? sizeof(Block8) : sizeof(Block16);
  const int64_t x_stride = panels.blocks * block_bytes;
  const Product product = {matrix,   input,    current_linear(),
                           panels,   x_stride, rounded_rows.reserve(rows * x_stride),
                           residual, out};
  const auto share = [=](int64_t products) {
    return static_cast<int>(std::clamp<int64_t>(products / thread_products, 1, threads));
  };
  // Rounding an activation costs about as much as 64 products.
  parallel_for(rows, share(rows * matrix.inputs * 64), [&](int64_t row, int) {
    product.round_row(x, row);
  });
  const int64_t tile = std::max<int64_t>(kTileBytes / std::max<int64_t>(x_stride, 1) / 4 * 4, 4);
  const int64_t tiles = (rows + tile - 1) / tile;
  const int workers = share(rows * matrix.inputs * matrix.outputs);
  const int64_t tasks =
      workers == 1 ? 1 : std::min<int64_t>(panels.count, workers * kTasksPerThread);
  parallel_for(tiles * tasks, workers, [&](int64_t index, int) {
    const int64_t first = index / tasks * tile, task = index % tasks;
    const int64_t stop = panels.count * (task + 1) / tasks;
    for (int64_t panel = panels.count * task / tasks; panel < stop; ++panel)
      product.multiply(panel, first, std::min(tile, rows - first));
  });
}

}  // namespace minima

using namespace minima;

void minima_linear(const MinimaMatrix* matrix, const MinimaInput* input, const float* x,
                   const float* residual, int64_t rows, float* out, int threads) {
  multiply(*matrix, *input, x, residual, rows, out, threads, kSleepingProducts);
}

int minima_matrix_rows(const MinimaMatrix* matrix, const int64_t* index, int64_t count,
                       float* out) {
  const Panels panels(*matrix);
  const auto half_at = [](const uint8_t* p, int64_t i) {
    uint16_t bits;
    std::memcpy(&bits, p + 2 * i, 2);
    return half_to_float(bits);
  };
  for (int64_t i = 0; i < count; ++i)
    if (index[i] < 0 || index[i] >= matrix->outputs) return 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* panel = matrix->panels + index[i] / kPanel * panels.stride;
    const uint8_t* scales = panel + panels.code_bytes;
    const uint8_t* minima = scales + panels.scale_bytes;
    const int64_t o = index[i] % kPanel;
    for (int64_t b = 0; b < panels.blocks; ++b) {
      float* target = out + i * matrix->inputs + b * kBlock;
      const float scale = half_at(scales, b * kPanel + o);
      if (matrix->kind == kQ8) {
        const uint8_t* codes = panel + b * kBlock * kPanel;
        for (int k = 0; k < kBlock; ++k)
          target[k] = scale * static_cast<int8_t>(codes[k / 4 * 64 + 4 * o + k % 4]);
        continue;
      }
      const uint8_t* codes = panel + b * kBlock * kPanel / 2;
      const float minimum = half_at(minima, b * kPanel + o);
      for (int k = 0; k < kBlock / 2; ++k) {
        const int code = codes[k / 4 * 64 + 4 * o + k % 4];
        target[k] = scale * static_cast<float>(code & 15) + minimum;
        target[k + kBlock / 2] = scale * static_cast<float>(code >> 4) + minimum;
      }
    }
  }
  return 1;
}

void minima_rotate(const float* x, int64_t rows, int64_t stride, int64_t heads, int64_t dim,
                   const float* cos, const float* sin, float* out) {
  const int64_t half = dim / 2;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < heads; ++head) {
      const float* from = x + row * stride + head * dim;
      const float *c = cos + row * dim, *s = sin + row * dim;
      float* to = out + (row * heads + head) * dim;
      for (int64_t i = 0; i < half; ++i) {
        to[i] = from[i] * c[i] + from[i + half] * s[i];
        to[i + half] = from[i + half] * c[i + half] + from[i] * s[i + half];
      }
    }
}
