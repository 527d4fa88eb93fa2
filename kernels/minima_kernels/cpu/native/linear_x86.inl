// Preparing and rounding activations with 256-bit vectors, for the AVX2 and AVX-512 levels. Included inside a
// level's namespace.

INLINE __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

constexpr int64_t kAhead = 8192;  // bytes

// The first rows meet weights that are in memory still; the hardware alone fetches them too late.
template <int BLOCK_BYTES>
INLINE void prefetch(const PanelJob& job, int64_t block) {
  const uint8_t* ahead = job.codes + block * BLOCK_BYTES + kAhead;
  for (int i = 0; i < BLOCK_BYTES; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T0);
}

INLINE float horizontal_sum(__m256 x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

void normalise(const float* x, int64_t inputs, const float* weight, float eps, float* out) {
  __m256 sums[4] = {};
  for (int64_t i = 0; i < inputs; i += kBlock)
    for (int j = 0; j < 4; ++j) {
      const __m256 value = _mm256_loadu_ps(x + i + 8 * j);
      sums[j] = _mm256_fmadd_ps(value, value, sums[j]);
    }
  const float total = horizontal_sum(
      _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
  const __m256 factor = _mm256_set1_ps(1 / std::sqrt(total / static_cast<float>(inputs) + eps));
  for (int64_t i = 0; i < inputs; i += 8) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + i), factor);
    _mm256_storeu_ps(out + i, _mm256_mul_ps(scaled, _mm256_loadu_ps(weight + i)));
  }
}

// 2**x for x <= 0; below -126 it gives 2**-126. Relative error below 3e-7.
INLINE __m256 exp2_negative(__m256 x) {
  x = _mm256_max_ps(x, _mm256_set1_ps(-126.0f));
  // Adding 1.5 * 2**23 leaves the nearest integer in the low bits of the sum.
  const __m256 shift = _mm256_set1_ps(0x1.8p23f);
  const __m256 shifted = _mm256_add_ps(x, shift);
  const __m256 f = _mm256_sub_ps(x, _mm256_sub_ps(shifted, shift));
  __m256 p = _mm256_set1_ps(1.326465428e-3f);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.671517651e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.550733985e-2f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.402224198e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.931469774e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
  return _mm256_castsi256_ps(_mm256_add_epi32(
      _mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}

void gate(const float* x, int64_t inputs, float* out) {
  const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
  const __m256 log2e = _mm256_set1_ps(1.442695041f);
  for (int64_t i = 0; i < inputs; i += 8) {
    const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + inputs + i);
    const __m256 e = exp2_negative(_mm256_mul_ps(_mm256_or_ps(a, sign), log2e));
    const __m256 numerator = _mm256_blendv_ps(one, e, a);  // e where a is negative
    const __m256 sigmoid = _mm256_div_ps(numerator, _mm256_add_ps(one, e));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(a, sigmoid), b));
  }
}

// The largest magnitude of 32 floats, as the bits of a float; NaN is larger than anything.
INLINE int32_t magnitude_bits(const float* x) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  __m256i top = _mm256_and_si256(load256(x), mask);
  for (int i = 1; i < 4; ++i)
    top = _mm256_max_epi32(top, _mm256_and_si256(load256(x + 8 * i), mask));
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}

// 32 rounded activations.
struct Rounded {
  __m256i codes[4];
  float scale;
};

INLINE Rounded round_block(const float* x, float limit) {
  const Step step = step_of(magnitude_bits(x), limit);
  Rounded rounded;
  rounded.scale = step.scale;
  const __m256 inverse = _mm256_set1_ps(step.inverse);
  for (int i = 0; i < 4; ++i) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), inverse);
    rounded.codes[i] = step.inverse == 0 ? _mm256_setzero_si256() : _mm256_cvtps_epi32(scaled);
  }
  return rounded;
}

INLINE int32_t total(const Rounded& rounded) {
  const __m256i x = _mm256_add_epi32(_mm256_add_epi32(rounded.codes[0], rounded.codes[1]),
                                     _mm256_add_epi32(rounded.codes[2], rounded.codes[3]));
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}

void round8(const float* x, int64_t blocks, Block8* out) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t b = 0; b < blocks; ++b) {
    const Rounded rounded = round_block(x + b * kBlock, kLimit8);
    const __m256i packed =
        _mm256_packs_epi16(_mm256_packs_epi32(rounded.codes[0], rounded.codes[1]),
                           _mm256_packs_epi32(rounded.codes[2], rounded.codes[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[b].codes),
                        _mm256_permutevar8x32_epi32(packed, order));
    out[b].scale = rounded.scale;
    out[b].sum = rounded.scale * static_cast<float>(total(rounded));
  }
}

void round16(const float* x, int64_t blocks, Block16* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    const Rounded rounded = round_block(x + b * kBlock, kLimit16);
    for (int i = 0; i < 2; ++i) {
      const __m256i packed = _mm256_permute4x64_epi64(
          _mm256_packs_epi32(rounded.codes[2 * i], rounded.codes[2 * i + 1]), 0xd8);
      const __m256i swapped =
          _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(packed, 0xd8), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[b].codes + 16 * i), swapped);
    }
    out[b].scale = rounded.scale;
    out[b].sum = rounded.scale * static_cast<float>(total(rounded));
  }
}
