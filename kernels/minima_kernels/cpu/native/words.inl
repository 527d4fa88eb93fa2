// Mixed-radix codes to bytes (centroid + kBias) with 256-bit vectors: the AVX2 and AVX-512 levels.
//
// Eight steps at a time, a 32-bit lane each: a step is one word, or two small neighbouring ones. A
// step is cut in two halves of at most three digits, one per 16-bit lane: two words by a shift, the
// digits of one word by a division in float32, which is exact below 2**24. Digits of a half come by
// multiplications: for h < 2**11 and levels <= 15, the high half of h * (65536 / levels + 1) is
// h / levels.

template <bool TWO_WORDS, bool THREE_DIGITS>
INLINE void unpack_steps(const LevelTable& table, const uint8_t* p, const uint8_t* end,
                         uint8_t* out, int64_t ahead) {
  const WordSteps& steps = table.steps;
  const __m256i shuffle = load256(steps.shuffle), shift = load256(steps.shift);
  const __m256i order = load256(steps.order);
  const __m256i lookup = _mm256_broadcastsi128_si256(load128(table.bytes));
  const __m256i mask = _mm256_set1_epi32((1 << steps.bits) - 1);
  const __m256i low_mask = _mm256_set1_epi32((1 << table.bits) - 1);
  const __m256i high_mask = _mm256_slli_epi32(low_mask, 16);
  const __m128i to_high = _mm_cvtsi32_si128(16 - table.bits);
  const float inverse = TWO_WORDS ? 0.0f : 1.0f / static_cast<float>(steps.radix);
  const __m256 quotient = _mm256_set1_ps(inverse), half = _mm256_set1_ps(0.5f * inverse);
  const __m256i radix = _mm256_set1_epi32(static_cast<int>(steps.radix));
  const __m256i by_levels = _mm256_set1_epi16(static_cast<int16_t>(65536 / table.levels + 1));
  const __m256i second = _mm256_set1_epi16(static_cast<int16_t>(256 - table.levels));
  const __m256i third = _mm256_set1_epi16(static_cast<int16_t>(256 * table.levels));
  const int codes = steps.codes;
  for (; out < end; p += steps.bits, out += 8 * codes) {
    __builtin_prefetch(p + ahead, 0, 3);
    const __m256i stream = _mm256_inserti128_si256(_mm256_castsi128_si256(load128(p)),
                                                   load128(p + steps.bits / 2), 1);
    const __m256i step = _mm256_and_si256(
        _mm256_srlv_epi32(_mm256_shuffle_epi8(stream, shuffle), shift), mask);
    __m256i halves;
    if constexpr (TWO_WORDS) {
      halves = _mm256_or_si256(_mm256_and_si256(step, low_mask),
                               _mm256_and_si256(_mm256_sll_epi32(step, to_high), high_mask));
    } else {
      const __m256i high = _mm256_cvttps_epi32(
          _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(step), quotient), half));
      const __m256i low = _mm256_sub_epi32(step, _mm256_madd_epi16(high, radix));
      halves = _mm256_or_si256(low, _mm256_slli_epi32(high, 16));
    }
    const __m256i h1 = _mm256_mulhi_epu16(halves, by_levels);
    __m256i digits = _mm256_add_epi16(halves, _mm256_mullo_epi16(h1, second));
    if constexpr (!THREE_DIGITS) {
      store256(out, _mm256_shuffle_epi8(lookup, digits));
      continue;
    }
    const __m256i h2 = _mm256_mulhi_epu16(h1, by_levels);
    digits = _mm256_sub_epi16(digits, _mm256_mullo_epi16(h2, third));
    const __m256i a = _mm256_shuffle_epi8(
        lookup, _mm256_shuffle_epi8(_mm256_unpacklo_epi32(digits, h2), order));
    const __m256i b = _mm256_shuffle_epi8(
        lookup, _mm256_shuffle_epi8(_mm256_unpackhi_epi32(digits, h2), order));
    // Each store covers what the one before wrote too much.
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * codes), _mm256_castsi256_si128(b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4 * codes), _mm256_extracti128_si256(a, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 6 * codes), _mm256_extracti128_si256(b, 1));
  }
}

// Codes first .. first + count of a stream whose level count is no power of two, for `out`, which may
// be written up to kSlack bytes before its start and behind its end. Asks for the bytes `ahead` of
// those that it reads.
void unpack_words(const LevelTable& table, const uint8_t* stream, int64_t first, int64_t count,
                  uint8_t* out, int64_t ahead) {
  const WordSteps& steps = table.steps;
  const int64_t group = first / steps.codes / 8;
  const uint8_t* p = stream + group * steps.bits;
  const uint8_t* end = out + count;
  out -= first - group * steps.codes * 8;
  if (steps.codes == 4) {
    if (steps.radix)
      unpack_steps<false, false>(table, p, end, out, ahead);
    else
      unpack_steps<true, false>(table, p, end, out, ahead);
  } else if (steps.radix) {
    unpack_steps<false, true>(table, p, end, out, ahead);
  } else {
    unpack_steps<true, true>(table, p, end, out, ahead);
  }
}
