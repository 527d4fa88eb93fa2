// All layers of a decoder in one call, for steps in which every request has one new token.
#pragma once
#include <cstdint>

#include "exports.h"
#include "linear.h"

extern "C" {

struct MinimaLayer {
  const MinimaMatrix* qkv;  // outputs: query heads, key heads, value heads
  const MinimaMatrix* output;
  const MinimaMatrix* gate_up;
  const MinimaMatrix* down;
  const MinimaInput* attention_input;
  const MinimaInput* mlp_input;
  const float* q_norm;  // [head_dim], RMSNorm of each query head; null if there is none
  const float* k_norm;
  float head_eps;
  int32_t padding;
};

struct MinimaStack {
  const MinimaLayer* layers;
  int64_t num_layers;
  const MinimaInput* final_norm;
  const float* rotary;  // [D / 2], what an angle grows by from position to position
  float amplitude;      // of cosines and sines
  int32_t padding;
};

// One decode batch. Rows are those of `plan`.
struct MinimaStep {
  const MinimaDecodePlan* plan;
  const MinimaGeometry* geometry;
  const MinimaFormat* const* formats;  // of each layer, its share of a page of each kind
  const MinimaFormat* recent;          // of each layer, its share of a page that takes new tokens
  const int64_t* page_bytes;           // [rows], where in the arena the page of each row starts
  const int64_t* slots;                // [rows], the row's place in its page
  const int64_t* positions;            // [rows], in the row's sequence
  uint8_t* arena;
  int64_t rotation_block;              // of the Hadamard blocks that rotate every head
  float scale;                         // of the scores
  int32_t padding;
};

// x: float32 [rows, outputs of the last layer], in place: embeddings become hidden states after the
// final norm. Computes what the calls for each layer one by one do: minima_linear, minima_rotate,
// minima_hadamard, minima_append, minima_decode. For one plan, a row of the result is the same bits
// on any number of threads.
MINIMA_EXPORT void minima_decode_layers(const MinimaStack* stack, const MinimaStep* step, float* x,
                                        int threads);

// What else the calls for each layer need for the same bits as `minima_decode_layers`.
// RMSNorm of rows [rows, dim] one after another; x and out may be the same.
MINIMA_EXPORT void minima_rms_norm(const float* x, int64_t rows, int64_t dim, const float* weight,
                                   float eps, float* out);
// cos, sin: float32 [rows, dim], as minima_rotate takes them.
MINIMA_EXPORT void minima_angles(const float* rotary, float amplitude, const int64_t* positions,
                                 int64_t rows, int64_t dim, float* cos, float* sin);

}  // extern "C"
