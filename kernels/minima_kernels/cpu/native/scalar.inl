// Expansion of keys and values into tiles, one value at a time: the portable level.

// Tiles keep the order of the channels on this level.
INLINE int turned_channels(const MinimaFormat&, int) { return 0; }
INLINE void turn_channels(float*, int, int, int) {}

// FP8 values stay at 2**-120 of their size, as on the other levels: the scales put it back.
INLINE float tile_value(const MinimaFormat& format, const uint8_t* codes, int64_t index) {
  const float value = stored_value(format.type, codes, index);
  return format.type == kFP8 ? value * 0x1p-120f : value;
}

void expand_keys(const MinimaFormat& format, const uint8_t* codes, const Chunk& chunk, int dim,
                 int16_t* keys, uint8_t* bytes) {
  bytes += kSlack;
  unpack_bytes(level_table(format.k_levels), codes, static_cast<int64_t>(chunk.first) * dim,
               static_cast<int64_t>(chunk.columns) * dim, bytes);
  for (int t = 0; t < chunk.columns; ++t) {
    const int at = chunk.column + t;
    int16_t* out = keys + (at / LANES) * dim * LANES + at % LANES * 2;
    for (int d = 0; d < dim; ++d)
      out[(d / 8 * 4 + d % 4) * 2 * LANES + d / 4 % 2] = bytes[t * dim + d];
  }
}

void expand_values(const MinimaFormat& format, const uint8_t* codes, const Chunk& chunk, int dim,
                   int16_t* values, uint8_t* bytes) {
  bytes += kSlack;
  unpack_bytes(level_table(format.v_levels), codes, static_cast<int64_t>(chunk.first) * dim,
               static_cast<int64_t>(chunk.columns) * dim, bytes);
  for (int t = 0; t < chunk.columns; ++t) {
    const int at = chunk.column + t;
    for (int d = 0; d < dim; ++d)
      values[((at / 16 * 8 + at % 8) * dim + d) * 2 + at / 8 % 2] = bytes[t * dim + d];
  }
}

void expand_keys(const MinimaFormat& format, const uint8_t* codes, const Chunk& chunk, int dim,
                 float* keys, uint8_t*) {
  for (int t = 0; t < chunk.columns; ++t) {
    const int at = chunk.column + t;
    for (int d = 0; d < dim; ++d)
      keys[(at / LANES * dim + d) * LANES + at % LANES] =
          tile_value(format, codes, static_cast<int64_t>(chunk.first + t) * dim + d);
  }
}

void expand_values(const MinimaFormat& format, const uint8_t* codes, const Chunk& chunk, int dim,
                   float* values, uint8_t*) {
  for (int t = 0; t < chunk.columns; ++t) {
    const int at = chunk.column + t;
    for (int d = 0; d < dim; ++d)
      values[at * dim + d] =
          t < chunk.tokens
              ? tile_value(format, codes, static_cast<int64_t>(chunk.first + t) * dim + d)
              : 0.0f;
  }
}
