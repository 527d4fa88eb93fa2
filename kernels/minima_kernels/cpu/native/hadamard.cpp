#include "hadamard.h"

#include <algorithm>
#include <cmath>

#include "pool.h"

namespace {

// Rows of a task, and so many that waking a thread pays: a row takes some 50 ns.
constexpr int64_t kTaskRows = 512, kThreadRows = 4096;

void transform(float* out, int64_t dim, int64_t block) {
  for (int64_t half = 1; half < block; half *= 2) {
    for (int64_t start = 0; start < dim; start += 2 * half) {
      float* low = out + start;
      float* high = low + half;
      for (int64_t i = 0; i < half; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a + b;
        high[i] = a - b;
      }
    }
  }
}

}  // namespace

void minima_hadamard(const float* x, float* out, int64_t rows, int64_t dim, int64_t block,
                     int threads) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(block));
  const int64_t tasks = (rows + kTaskRows - 1) / kTaskRows;
  minima::parallel_for(tasks, rows < kThreadRows ? 1 : threads, [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * kTaskRows);
    for (int64_t row = task * kTaskRows; row < end; ++row) {
      const float* from = x + row * dim;
      float* to = out + row * dim;
      for (int64_t i = 0; i < dim; ++i) to[i] = from[i] * scale;
      transform(to, dim, block);
    }
  });
}
