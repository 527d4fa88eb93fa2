// Expansion of keys and values into tiles, one value at a time: the portable level.

INLINE float load_value(const MinimaFormat& format, const uint8_t* p, int64_t index) {
  uint16_t half;
  uint32_t bits;
  float value;
  switch (format.type) {
    case kFP8:
      return e4m3_to_float(p[index]) * 0x1p-120f;
    case kF16:
      __builtin_memcpy(&half, p + 2 * index, 2);
      return half_to_float(half);
    case kBF16:
      __builtin_memcpy(&half, p + 2 * index, 2);
      bits = static_cast<uint32_t>(half) << 16;
      __builtin_memcpy(&value, &bits, 4);
      return value;
    default:
      __builtin_memcpy(&value, p + 4 * index, 4);
      return value;
  }
}

void expand_keys(const MinimaFormat& format, const uint8_t* codes, const Chunk& chunk, int dim,
                 int16_t* keys, uint8_t* bytes) {
  bytes += 8;
  unpack_bytes(level_table(format.k_levels), codes, static_cast<int64_t>(chunk.first) * dim,
               static_cast<int64_t>(chunk.columns) * dim, bytes);
  for (int t = 0; t < chunk.columns; ++t) {
    const int at = chunk.column + t;
    int16_t* out = keys + (at / LANES) * dim * LANES + at % LANES * 2;
    for (int d = 0; d < dim; ++d) out[d / 2 * 2 * LANES + d % 2] = bytes[t * dim + d];
  }
}

void expand_values(const MinimaFormat& format, const uint8_t* codes, const Chunk& chunk, int dim,
                   int16_t* values, uint8_t* bytes) {
  bytes += 8;
  unpack_bytes(level_table(format.v_levels), codes, static_cast<int64_t>(chunk.first) * dim,
               static_cast<int64_t>(chunk.columns) * dim, bytes);
  for (int t = 0; t < chunk.columns; ++t) {
    const int at = chunk.column + t;
    for (int d = 0; d < dim; ++d)
      values[(at / 2 * dim + d) * 2 + at % 2] =
          bytes[t * dim + d];
  }
}

void expand_keys(const MinimaFormat& format, const uint8_t* codes, const Chunk& chunk, int dim,
                 float* keys, uint8_t*) {
  for (int t = 0; t < chunk.columns; ++t) {
    const int at = chunk.column + t;
    for (int d = 0; d < dim; ++d)
      keys[(at / LANES * dim + d) * LANES + at % LANES] =
          load_value(format, codes, static_cast<int64_t>(chunk.first + t) * dim + d);
  }
}

void expand_values(const MinimaFormat& format, const uint8_t* codes, const Chunk& chunk, int dim,
                   float* values, uint8_t*) {
  for (int t = 0; t < chunk.columns; ++t) {
    const int at = chunk.column + t;
    for (int d = 0; d < dim; ++d)
      values[at * dim + d] =
          t < chunk.tokens
              ? load_value(format, codes, static_cast<int64_t>(chunk.first + t) * dim + d)
              : 0.0f;
  }
}
