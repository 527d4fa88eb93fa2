// Linear layers at the level in use, on panels, inputs and outputs that end where their memory does;
// sanitize.cpp calls it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "linear.h"

namespace {

std::vector<float> multiply(const MinimaMatrix& matrix, const std::vector<float>& x, int64_t rows,
                            int threads) {
  std::vector<float> out(rows * matrix.outputs);
  const MinimaInput plain = {kPlain, 0, nullptr};
  minima_linear(&matrix, &plain, x.data(), nullptr, rows, out.data(), threads);
  return out;
}

void run(BlockKind kind, int bits, int64_t outputs, int64_t inputs, int64_t rows) {
  std::mt19937 generator(static_cast<unsigned>(outputs * 1000 + inputs + rows));
  std::normal_distribution<float> law;
  const int64_t blocks = inputs / 32, panels = (outputs + 15) / 16;
  const int64_t code_bytes = blocks * (kind == kQ4 ? 256 : 512);
  const int64_t stride = (code_bytes + blocks * (kind == kQ4 ? 64 : 32) + 63) / 64 * 64;
  const std::unique_ptr<uint8_t[]> data(new uint8_t[panels * stride]);
  for (int64_t i = 0; i < panels * stride; ++i)  // float16 from 2**-8 to 2**-7
    data[i] = i % stride < code_bytes ? static_cast<uint8_t>(generator()) : i % 2 ? 0x1c : 0x11;
  std::vector<float> bias(outputs), x(rows * inputs);
  for (float& value : bias) value = law(generator);
  for (float& value : x) value = law(generator);
  const MinimaMatrix matrix = {kind, bits, outputs, inputs, data.get(), bias.data()};
  const std::vector<float> out = multiply(matrix, x, rows, 2);

  std::vector<int64_t> index(outputs);
  for (int64_t i = 0; i < outputs; ++i) index[i] = outputs - 1 - i;
  std::vector<float> weights(outputs * inputs);
  if (!minima_matrix_rows(&matrix, index.data(), outputs, weights.data())) std::abort();
  index[0] = outputs;
  if (minima_matrix_rows(&matrix, index.data(), 1, weights.data())) std::abort();
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t o = 0; o < outputs; ++o) {
      double expected = bias[o], size = 1;
      for (int64_t k = 0; k < inputs; ++k) {
        const double term = x[row * inputs + k] * static_cast<double>(
                                                      weights[(outputs - 1 - o) * inputs + k]);
        expected += term;
        size += std::fabs(term);
      }
      if (!(std::fabs(out[row * outputs + o] - expected) < (bits == 8 ? 2e-2 : 1e-4) * size)) {
        std::printf("linear %d bits %d [%d, %d]: %g instead of %g\n", kind, bits,
                    static_cast<int>(outputs), static_cast<int>(inputs), out[row * outputs + o],
                    expected);
        std::exit(1);
      }
    }
}

}  // namespace

void check_linear() {
  for (const int64_t outputs : {1, 16, 35})
    for (const int64_t inputs : {32, 96})
      for (const int64_t rows : {1, 2, 7, 13}) {
        run(kQ4, 8, outputs, inputs, rows);
        run(kQ4, 16, outputs, inputs, rows);
        run(kQ8, 16, outputs, inputs, rows);
      }
  run(kQ4, 16, 600, 320, 9);  // enough products for two threads
}
