// Linear layers over weights in blocks of 32, as GGUF keeps them: Q4 is 4-bit codes, a scale and a
// minimum per block (Q4_1; Q4_0 with a minimum of -8 scales), Q8 is int8 codes and a scale (Q8_0).
//
// A matrix is stored in panels of 16 outputs, one after another, the last one filled up with zeros.
// Of a panel come first the codes, block by block; a block lists its inputs four by four and of each
// four all outputs: output o, input 4q + j is byte 64q + 4o + j. Q4 has inputs 0 to 15 in the low
// halves of 256 bytes and 16 to 31 in the high ones. Then float16 scales, 16 per block, for Q4 as
// many minima, and zeros up to a multiple of 64 bytes.
#pragma once
#include <cstdint>

#include "exports.h"

extern "C" {

enum BlockKind : int32_t { kQ4 = 0, kQ8 = 1 };

struct MinimaMatrix {
  int32_t kind;
  int32_t activation_bits;  // 8 or 16 for Q4, 16 for Q8
  int64_t outputs, inputs;  // inputs: a multiple of 32
  const uint8_t* panels;
  const float* bias;  // [outputs] or null
};

enum InputKind : int32_t {
  kPlain = 0,
  kNormed = 1,  // the rows go through RMSNorm first
  kGated = 2,   // [rows, 2 inputs]: silu of the first half times the second half
};

// What a product starts from.
struct MinimaInput {
  int32_t kind;
  float eps;                 // of the norm
  const float* norm_weight;  // [inputs]
};

// out = input(x) W^T + bias + residual; x: float32 [rows, inputs] or [rows, 2 inputs]; residual
// (may be null) and out: float32 [rows, outputs]. Blocks of 32 activations are rounded to integers
// of `activation_bits`. A row of the result is the same bits whatever the other rows are and on any
// number of threads.
MINIMA_EXPORT void minima_linear(const MinimaMatrix* matrix, const MinimaInput* input,
                                 const float* x, const float* residual, int64_t rows, float* out,
                                 int threads);

// out: float32 [count, inputs], rows `index` of W. 0 if an index is out of range.
MINIMA_EXPORT int minima_matrix_rows(const MinimaMatrix* matrix, const int64_t* index,
                                     int64_t count, float* out);

// Rotary embedding, half-split: x float32 [rows, stride], of each row `heads` heads of `dim`; cos and
// sin: float32 [rows, dim], sin negative in the first half; out: float32 [rows, heads, dim].
MINIMA_EXPORT void minima_rotate(const float* x, int64_t rows, int64_t stride, int64_t heads,
                                 int64_t dim, const float* cos, const float* sin, float* out);

}  // extern "C"

namespace minima {

constexpr int kBlock = 32;
constexpr int kPanel = 16;

// 32 activations in integers: value = scale * code, and the sum of the 32 values.
struct Block8 {
  int8_t codes[kBlock];
  float scale, sum;
};
struct Block16 {
  int16_t codes[kBlock];  // of every four the order is 0, 2, 1, 3
  float scale, sum;
};

// Rounded rows times one panel.
struct PanelJob {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* minima;
  int64_t blocks;
  const uint8_t* x;  // rows of Block8 or Block16
  int64_t x_stride;  // bytes from row to row
  int64_t rows;
  float* out;  // 16 results per row
  int64_t out_stride;
};

struct LinearLevel {
  void (*normalise)(const float* x, int64_t inputs, const float* weight, float eps, float* out);
  void (*gate)(const float* x, int64_t inputs, float* out);
  void (*round8)(const float* x, int64_t blocks, Block8* out);
  void (*round16)(const float* x, int64_t blocks, Block16* out);
  void (*q4_8)(const PanelJob& job);
  void (*q4_16)(const PanelJob& job);
  void (*q8_16)(const PanelJob& job);
};

// `minima_linear` where another thread pays from `thread_products` products on.
void multiply(const MinimaMatrix& matrix, const MinimaInput& input, const float* x,
              const float* residual, int64_t rows, float* out, int threads,
              int64_t thread_products);

extern const LinearLevel portable_linear;
#if defined(__x86_64__)
extern const LinearLevel avx2_linear;
extern const LinearLevel avx512_linear;
#endif

}  // namespace minima
