// The layers of a decode step, one after another. Between calls from Python the pool's threads fall
// asleep; within one call they look out for work, so that even small products are worth sharing.
#include "stack.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "buffer.h"
#include "decode.h"
#include "hadamard.h"

namespace minima {
namespace {

// What pays for a thread that is awake: some 10 us of work.
constexpr int64_t kAwakeProducts = 100'000;
constexpr int64_t kAwakeReads = 1 << 9;

const MinimaInput plain_input = {kPlain, 0, nullptr}, gated_input = {kGated, 0, nullptr};

thread_local Buffer scratch;

class Run {
 public:
  Run(const MinimaStack& stack, const MinimaStep& step, int threads)
      : step_(step),
        threads_(threads),
        rows_(step.plan->num_rows),
        dim_(step.geometry->head_dim),
        kv_heads_(step.geometry->kv_heads),
        heads_(kv_heads_ * step.geometry->group),
        stride_(stack.layers->qkv->outputs) {
    const MinimaLayer& first = *stack.layers;
    const int64_t sizes[] = {
        rows_ * stride_,
        rows_ * heads_ * dim_,
        rows_ * kv_heads_ * dim_,
        rows_ * kv_heads_ * dim_,
        rows_ * heads_ * dim_,
        rows_ * first.output->outputs,
        rows_ * first.gate_up->outputs,
        step.plan->num_partials * heads_ * (dim_ + 2),
        rows_ * heads_,
        rows_ * dim_,
        rows_ * dim_,
    };
    float** parts[] = {&qkv_,     &q_,        &k_,   &v_,   &attended_, &middle_,
                       &gate_up_, &partials_, &lse_, &cos_, &sin_};
    const auto padded = [](int64_t size) { return (size + 15) / 16 * 16; };
    int64_t all = 0;
    for (const int64_t size : sizes) all += padded(size);
    auto* at = reinterpret_cast<float*>(scratch.reserve(all * sizeof(float)));
    for (size_t i = 0; i < std::size(sizes); ++i) {
      *parts[i] = at;
      at += padded(sizes[i]);
    }
    minima_angles(stack.rotary, stack.amplitude, step.positions, rows_, dim_, cos_, sin_);
  }

  void layer(const MinimaLayer& layer, int64_t index, float* x) {
    product(*layer.qkv, *layer.attention_input, x, nullptr, qkv_);
    attend(layer, index);
    product(*layer.output, plain_input, attended_, x, middle_);
    product(*layer.gate_up, *layer.mlp_input, middle_, nullptr, gate_up_);
    product(*layer.down, gated_input, gate_up_, middle_, x);
  }

 private:
  void product(const MinimaMatrix& matrix, const MinimaInput& input, const float* x,
               const float* residual, float* out) const {
    multiply(matrix, input, x, residual, rows_, out, threads_, kAwakeProducts);
  }

  void attend(const MinimaLayer& layer, int64_t index) {
    for (int64_t row = 0; row < rows_; ++row) {
      float* q = qkv_ + row * stride_;
      if (layer.q_norm) minima_rms_norm(q, heads_, dim_, layer.q_norm, layer.head_eps, q);
      float* k = q + heads_ * dim_;
      if (layer.k_norm) minima_rms_norm(k, kv_heads_, dim_, layer.k_norm, layer.head_eps, k);
    }
    turn(qkv_, heads_, q_);
    turn(qkv_ + heads_ * dim_, kv_heads_, k_);
    const float* v = qkv_ + (heads_ + kv_heads_) * dim_;
    for (int64_t row = 0; row < rows_; ++row)
      rotate(v + row * stride_, v_ + row * kv_heads_ * dim_, kv_heads_);
    rotate(q_, q_, rows_ * heads_);
    rotate(k_, k_, rows_ * kv_heads_);
    minima_append(step_.recent + index, step_.geometry, k_, v_, step_.arena, step_.page_bytes,
                  step_.slots, rows_, threads_);
    decode(*step_.plan, *step_.geometry, step_.formats[index], q_, step_.arena, step_.scale,
           partials_, attended_, lse_, nullptr, threads_, kAwakeReads);
    rotate(attended_, attended_, rows_ * heads_);
  }

  // Rotary embedding.
  void turn(const float* x, int64_t heads, float* out) const {
    minima_rotate(x, rows_, stride_, heads, dim_, cos_, sin_, out);
  }

  // The change of basis of all pages.
  void rotate(const float* x, float* out, int64_t heads) const {
    minima_hadamard(x, out, heads, dim_, step_.rotation_block, threads_);
  }

  const MinimaStep& step_;
  const int threads_;
  const int64_t rows_, dim_, kv_heads_, heads_, stride_;
  float *qkv_, *q_, *k_, *v_, *attended_, *middle_, *gate_up_, *partials_, *lse_,
      *cos_, *sin_;
};

}  // namespace
}  // namespace minima

using namespace minima;

void minima_decode_layers(const MinimaStack* stack, const MinimaStep* step, float* x,
                          int threads) {
  Run run(*stack, *step, threads);
  for (int64_t i = 0; i < stack->num_layers; ++i) run.layer(stack->layers[i], i, x);
  const MinimaInput& norm = *stack->final_norm;
  minima_rms_norm(x, step->plan->num_rows, stack->layers->down->outputs, norm.norm_weight, norm.eps,
                  x);
}

void minima_rms_norm(const float* x, int64_t rows, int64_t dim, const float* weight, float eps,
                     float* out) {
  for (int64_t row = 0; row < rows; ++row, x += dim, out += dim) {
    float sums[8] = {};
    for (int64_t i = 0; i < dim; ++i) sums[i % 8] += x[i] * x[i];
    float total = 0;
    for (const float sum : sums) total += sum;
    const float factor = 1 / std::sqrt(total / static_cast<float>(dim) + eps);
    for (int64_t i = 0; i < dim; ++i) out[i] = x[i] * factor * weight[i];
  }
}

void minima_angles(const float* rotary, float amplitude, const int64_t* positions, int64_t rows,
                   int64_t dim, float* cos, float* sin) {
  const int64_t half = dim / 2;
  for (int64_t row = 0; row < rows; ++row, cos += dim, sin += dim) {
    const auto position = static_cast<float>(positions[row]);
    for (int64_t i = 0; i < half; ++i) {
      const float angle = position * rotary[i];
      cos[i] = cos[i + half] = std::cos(angle) * amplitude;
      sin[i + half] = std::sin(angle) * amplitude;
      sin[i] = -sin[i + half];
    }
  }
}
