// Expansion of keys and values into tiles with 256-bit vectors: the AVX2 and AVX-512 levels.
// Loads may run up to 32 bytes past a part's end; another part of the page follows it there.

constexpr int kHalves = LANES / 8;  // 8-lane groups per vector

// Index of 8-token group `group`, step `k` of `depth`, in a tile of keys.
INLINE int64_t key_place(int group, int depth, int k) {
  return (static_cast<int64_t>(group / kHalves) * depth + k) * LANES + group % kHalves * 8;
}

INLINE __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
INLINE void store256(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

// rows[i] lane j becomes rows[j] lane i, 32-bit lanes.
INLINE void transpose(__m256i rows[8]) {
  __m256i a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    b[4 * i + 0] = _mm256_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm256_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm256_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm256_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
  }
}

// Bit fields of BITS bits. Codes of a row are taken by octets (eight codes, BITS bytes), each as two
// 16-bit words: one that holds codes 0-3, one that holds codes 4-7. So both codes of a pair (i, i + 4)
// are shifted down at once, each by a count of its own: the high half of a product does that.
template <int BITS>
struct Octets {
  static constexpr int low_shift(int i) { return BITS * i; }
  // The second word of an octet starts at its second byte if the octet has more than two.
  static constexpr int high_shift(int i) { return BITS * (i + 4) - (BITS >= 3 ? 8 * (BITS - 2) : 0); }
  static constexpr int kHighByte = BITS >= 3 ? BITS - 2 : 0;
};

// Code `i` of each 32-bit lane's low word and code `i + 4` of its high one, as centroids in 16-bit
// lanes: high bytes index entry 0 of the table, which is zero.
template <int BITS, int LOW, int HIGH>
INLINE __m256i look_up(__m256i words, __m256i table) {
  __m256i codes;
  if constexpr (LOW == HIGH) {
    codes = LOW == 0 ? words : _mm256_srli_epi16(words, LOW);
    codes = _mm256_and_si256(codes, _mm256_set1_epi16((1 << BITS) - 1));
  } else if constexpr (LOW == 0) {
    // No factor shifts down by nothing: shift up to the top, then down.
    constexpr int kLow = 1 << (16 - BITS), kHigh = 1 << (16 - BITS - HIGH);
    codes = _mm256_mullo_epi16(words, _mm256_set1_epi32(kLow | kHigh << 16));
    codes = _mm256_srli_epi16(codes, 16 - BITS);
  } else {
    constexpr uint32_t kLow = 1u << (16 - LOW), kHigh = 1u << (16 - HIGH);
    codes = _mm256_mulhi_epu16(words, _mm256_set1_epi32(static_cast<int>(kLow | kHigh << 16)));
    codes = _mm256_and_si256(codes, _mm256_set1_epi16((1 << BITS) - 1));
  }
  return _mm256_shuffle_epi8(table, codes);
}

// Eight octets of a row, a 32-bit lane each, low word first.
template <int BITS>
INLINE __m256i load_octets(const uint8_t* p) {
  if constexpr (BITS == 4) return load256(p);
  if constexpr (BITS == 3) {
    const __m256i halves = _mm256_inserti128_si256(_mm256_castsi128_si256(load128(p)),
                                                   load128(p + 12), 1);
    return _mm256_shuffle_epi8(
        halves, _mm256_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11, 0, 1, 1, 2, 3,
                                 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11));
  }
  if constexpr (BITS == 2) {
    const __m256i words = _mm256_cvtepu16_epi32(load128(p));
    return _mm256_or_si256(words, _mm256_slli_epi32(words, 16));
  }
  const __m256i words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_or_si256(words, _mm256_slli_epi32(words, 16));
}

template <int BITS, int I>
INLINE void store_key_pair(int16_t* out, __m256i words, __m256i table) {
  using O = Octets<BITS>;
  store256(out + I * 2 * LANES, look_up<BITS, O::low_shift(I), O::high_shift(I)>(words, table));
}

template <int BITS>
void keys_from_fields(const uint8_t* codes, const uint8_t* centroids, const Chunk& chunk, int dim,
                      int16_t* keys) {
  const __m256i table = _mm256_broadcastsi128_si256(load128(centroids));
  const int row_bytes = dim * BITS / 8, octets = dim / 8;
  for (int t = 0; t < chunk.columns; t += 8) {
    const uint8_t* row = codes + static_cast<int64_t>(chunk.first + t) * row_bytes;
    const int group = (chunk.column + t) / 8;
    ask_for(row + chunk.ahead, 8 * row_bytes);
    for (int octet = 0; octet < octets; octet += 8) {
      __m256i lanes[8];
      for (int i = 0; i < 8; ++i)
        lanes[i] = load_octets<BITS>(row + i * row_bytes + octet * BITS);
      transpose(lanes);
      const int count = octets - octet < 8 ? octets - octet : 8;
      int16_t* out = keys + 2 * key_place(group, dim / 2, octet * 4);
      for (int j = 0; j < count; ++j, out += 8 * LANES) {
        store_key_pair<BITS, 0>(out, lanes[j], table);
        store_key_pair<BITS, 1>(out, lanes[j], table);
        store_key_pair<BITS, 2>(out, lanes[j], table);
        store_key_pair<BITS, 3>(out, lanes[j], table);
      }
    }
  }
}

// Eight octets of channels of two tokens: lane i of vector j holds channel 8 * i + j of both.
template <int BITS, int I>
INLINE void look_up_values(__m256i* out, __m256i low, __m256i high, __m256i table) {
  using O = Octets<BITS>;
  out[I] = look_up<BITS, O::low_shift(I), O::low_shift(I)>(low, table);
  out[I + 4] = look_up<BITS, O::high_shift(I), O::high_shift(I)>(high, table);
}

template <int BITS>
INLINE void look_up_values(__m256i out[8], const uint8_t* row, int64_t half, __m256i table) {
  const __m256i a = load_octets<BITS>(row), b = load_octets<BITS>(row + half);
  const __m256i low = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
  const __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa);
  look_up_values<BITS, 0>(out, low, high, table);
  look_up_values<BITS, 1>(out, low, high, table);
  look_up_values<BITS, 2>(out, low, high, table);
  look_up_values<BITS, 3>(out, low, high, table);
}

// Blocks of 64 channels are left turned (see `turn_channels`), the rest is put in order.
template <int BITS>
void values_from_fields(const uint8_t* codes, const uint8_t* centroids, const Chunk& chunk, int dim,
                        int16_t* values) {
  const __m256i table = _mm256_broadcastsi128_si256(load128(centroids));
  const int64_t row_bytes = dim * BITS / 8, half = 8 * row_bytes;
  const uint8_t* row = codes + chunk.first * row_bytes;
  int16_t* out = values + static_cast<int64_t>(chunk.column) * dim;
  for (int t = 0; t < chunk.columns; t += 16, row += half) {
    ask_for(row + chunk.ahead, 2 * half);
    for (int i = 0; i < 8; ++i, row += row_bytes) {
      const uint8_t* p = row;
      int d = 0;
      for (; d + 64 <= dim; d += 64, p += 8 * BITS, out += 128) {
        __m256i pairs[8];
        look_up_values<BITS>(pairs, p, half, table);
        for (int j = 0; j < 8; ++j) store256(out + 16 * j, pairs[j]);
      }
      if (d == dim) continue;
      __m256i pairs[8];
      look_up_values<BITS>(pairs, p, half, table);
      transpose(pairs);
      for (int j = 0; d < dim; d += 8, ++j, out += 16) store256(out, pairs[j]);
    }
  }
}

#include "words.inl"

// The same from bytes: mixed-radix codes that `unpack_words` has expanded.
void keys_from_bytes(const uint8_t* bytes, const Chunk& chunk, int dim, int16_t* keys) {
  // Octets as codes 0, 1, 4, 5 and 2, 3, 6, 7.
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1,
                                         4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  const __m256i low = _mm256_set1_epi16(0xff);
  for (int t = 0; t < chunk.columns; t += 8) {
    const int group = (chunk.column + t) / 8;
    for (int d = 0; d < dim; d += 32) {
      __m256i lanes[8];
      for (int i = 0; i < 8; ++i)
        lanes[i] = _mm256_shuffle_epi8(load256(bytes + (t + i) * dim + d), order);
      transpose(lanes);
      const int count = dim - d < 32 ? (dim - d) / 4 : 8;
      int16_t* out = keys + 2 * key_place(group, dim / 2, d / 2);
      for (int j = 0; j < count; ++j) {
        store256(out + 2 * j * 2 * LANES, _mm256_and_si256(lanes[j], low));
        store256(out + (2 * j + 1) * 2 * LANES, _mm256_srli_epi16(lanes[j], 8));
      }
    }
  }
}

void values_from_bytes(const uint8_t* bytes, const Chunk& chunk, int dim,
                       int16_t* values) {
  const __m256i spread = _mm256_setr_epi8(0, -1, 1, -1, 2, -1, 3, -1, 8, -1, 9, -1, 10, -1, 11, -1,
                                          4, -1, 5, -1, 6, -1, 7, -1, 12, -1, 13, -1, 14, -1, 15,
                                          -1);
  int16_t* out = values + static_cast<int64_t>(chunk.column) * dim;
  const int half = 8 * dim;
  for (const uint8_t* end = bytes + chunk.columns * dim; bytes < end; bytes += half) {
    for (const uint8_t* stop = bytes + half; bytes < stop; bytes += 16, out += 32) {
      const __m256i a = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load128(bytes)), spread);
      const __m256i b =
          _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load128(bytes + half)), spread);
      store256(out, _mm256_unpacklo_epi16(a, b));
      store256(out + 16, _mm256_unpackhi_epi16(a, b));
    }
  }
}

void expand_keys(const MinimaFormat& format, const uint8_t* codes, const Chunk& chunk, int dim,
                 int16_t* keys, uint8_t* bytes) {
  const LevelTable& table = level_table(format.k_levels);
  switch (format.k_levels) {
    case 16: return keys_from_fields<4>(codes, table.bytes, chunk, dim, keys);
    case 8: return keys_from_fields<3>(codes, table.bytes, chunk, dim, keys);
    case 4: return keys_from_fields<2>(codes, table.bytes, chunk, dim, keys);
    case 2: return keys_from_fields<1>(codes, table.bytes, chunk, dim, keys);
    default: break;
  }
  unpack_words(table, codes, static_cast<int64_t>(chunk.first) * dim,
               static_cast<int64_t>(chunk.columns) * dim, bytes + kSlack, chunk.ahead);
  keys_from_bytes(bytes + kSlack, chunk, dim, keys);
}

void expand_values(const MinimaFormat& format, const uint8_t* codes, const Chunk& chunk, int dim,
                   int16_t* values, uint8_t* bytes) {
  const LevelTable& table = level_table(format.v_levels);
  switch (format.v_levels) {
    case 16: return values_from_fields<4>(codes, table.bytes, chunk, dim, values);
    case 8: return values_from_fields<3>(codes, table.bytes, chunk, dim, values);
    case 4: return values_from_fields<2>(codes, table.bytes, chunk, dim, values);
    case 2: return values_from_fields<1>(codes, table.bytes, chunk, dim, values);
    default: break;
  }
  unpack_words(table, codes, static_cast<int64_t>(chunk.first) * dim,
               static_cast<int64_t>(chunk.columns) * dim, bytes + kSlack, chunk.ahead);
  values_from_bytes(bytes + kSlack, chunk, dim, values);
}

// Channels of a tile of values that are in another order: 8 * i + j at place 8 * j + i of each 64.
INLINE int turned_channels(const MinimaFormat& format, int dim) {
  return format.type == kTQ && level_table(format.v_levels).planar ? dim / 64 * 64 : 0;
}

// From this order to that of the channels, or back.
void turn_channels(float* rows, int num_rows, int dim, int turned) {
  for (int r = 0; r < num_rows; ++r) {
    for (int d = 0; d < turned; d += 64) {
      float* block = rows + static_cast<int64_t>(r) * dim + d;
      __m256i lanes[8];
      for (int i = 0; i < 8; ++i) lanes[i] = load256(block + 8 * i);
      transpose(lanes);
      for (int i = 0; i < 8; ++i) store256(block + 8 * i, lanes[i]);
    }
  }
}

// FP8 values stay at 2**-120 of their size: moved into place, e4m3 bits are float32 bits of that,
// subnormal numbers included. The scales put the factor back.
constexpr int32_t kFP8Mask = static_cast<int32_t>(0x87f00000u);

void expand_keys(const MinimaFormat& format, const uint8_t* codes, const Chunk& chunk, int dim,
                 float* keys, uint8_t*) {
  const int row_bytes = format.type == kFP8 ? dim : format.type == kF32 ? 4 * dim : 2 * dim;
  const __m256i fp8_mask = _mm256_set1_epi32(kFP8Mask);
  const __m256i high_mask = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
  for (int t = 0; t < chunk.columns; t += 8) {
    const uint8_t* row = codes + static_cast<int64_t>(chunk.first + t) * row_bytes;
    float* out = keys + key_place((chunk.column + t) / 8, dim, 0);
    ask_for(row + chunk.ahead, 8 * row_bytes);
    __m256i lanes[8];
    if (format.type == kFP8) {
      for (int d = 0; d < dim; d += 32) {
        for (int i = 0; i < 8; ++i) lanes[i] = load256(row + i * row_bytes + d);
        transpose(lanes);
        const int count = dim - d < 32 ? (dim - d) / 4 : 8;
        for (int j = 0; j < count; ++j) {
          float* at = out + (d + 4 * j) * LANES;
          for (int byte = 0; byte < 4; ++byte) {
            const __m256i top = _mm256_slli_epi32(lanes[j], 24 - 8 * byte);
            store256(at + byte * LANES, _mm256_and_si256(_mm256_srai_epi32(top, 4), fp8_mask));
          }
        }
      }
    } else if (format.type == kBF16) {
      for (int d = 0; d < dim; d += 16) {
        for (int i = 0; i < 8; ++i) lanes[i] = load256(row + i * row_bytes + 2 * d);
        transpose(lanes);
        for (int j = 0; j < 8; ++j) {
          store256(out + (d + 2 * j) * LANES, _mm256_slli_epi32(lanes[j], 16));
          store256(out + (d + 2 * j + 1) * LANES, _mm256_and_si256(lanes[j], high_mask));
        }
      }
    } else {
      for (int d = 0; d < dim; d += 8) {
        for (int i = 0; i < 8; ++i) {
          const uint8_t* p = row + i * row_bytes;
          lanes[i] = format.type == kF32
                         ? load256(p + 4 * d)
                         : _mm256_castps_si256(_mm256_cvtph_ps(load128(p + 2 * d)));
        }
        transpose(lanes);
        for (int j = 0; j < 8; ++j) store256(out + (d + j) * LANES, lanes[j]);
      }
    }
  }
}

// Eight values of a row, as they are in a tile.
template <int TYPE>
INLINE __m256i load_floats(const uint8_t* p) {
  if constexpr (TYPE == kFP8) {
    const __m256i wide =
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_and_si256(_mm256_slli_epi32(wide, 20), _mm256_set1_epi32(kFP8Mask));
  }
  if constexpr (TYPE == kBF16) return _mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16);
  if constexpr (TYPE == kF16) return _mm256_castps_si256(_mm256_cvtph_ps(load128(p)));
  return load256(p);
}

template <int TYPE>
void values_from_rows(const uint8_t* codes, const Chunk& chunk, int dim,
                      float* values) {
  constexpr int kWidth = TYPE == kFP8 ? 1 : TYPE == kF32 ? 4 : 2;
  const uint8_t* p = codes + static_cast<int64_t>(chunk.first) * dim * kWidth;
  float* out = values + static_cast<int64_t>(chunk.column) * dim;
  const float* valid = out + chunk.tokens * dim;
  const float* end = out + chunk.columns * dim;
  while (out < valid) {
    ask_for(p + chunk.ahead, dim * kWidth);
    for (const float* row = out + dim; out < row; p += 8 * kWidth, out += 8)
      store256(out, load_floats<TYPE>(p));
  }
  // Bytes behind the last token may be anything; a weight of zero does not undo a NaN.
  for (; out < end; out += 8) store256(out, _mm256_setzero_si256());
}

void expand_values(const MinimaFormat& format, const uint8_t* codes, const Chunk& chunk, int dim,
                   float* values, uint8_t*) {
  switch (format.type) {
    case kFP8: return values_from_rows<kFP8>(codes, chunk, dim, values);
    case kBF16: return values_from_rows<kBF16>(codes, chunk, dim, values);
    case kF16: return values_from_rows<kF16>(codes, chunk, dim, values);
    default: return values_from_rows<kF32>(codes, chunk, dim, values);
  }
}
