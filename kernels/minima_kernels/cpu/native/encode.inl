// Rows to codes and back: sealing, retiering, appending. Included inside a level's namespace.

typedef uint8_t VBytes __attribute__((vector_size(LANES), aligned(1)));

INLINE VI as_int(VF v) { return reinterpret_cast<VI>(v); }
INLINE VF as_float(VI v) { return reinterpret_cast<VF>(v); }

// One head's codes of a page to float32 rows [tokens, D]: K if `key`, else V. Without the mean.
void decode_codes(const MinimaFormat& format, const MinimaGeometry& g, const uint8_t* page, int head,
                  bool key, float* rows, uint8_t* bytes) {
  const int dim = g.head_dim, tokens = g.page_size;
  const uint8_t* codes = page + (key ? format.k_codes + head * format.k_codes_head
                                     : format.v_codes + head * format.v_codes_head);
  const int64_t scales = key ? format.k_scales + head * format.k_scales_head
                             : format.v_scales + head * format.v_scales_head;
  const int levels = key ? format.k_levels : format.v_levels;
  if (format.type == kTQ)
    unpack_bytes(level_table(levels), codes, 0, static_cast<int64_t>(tokens) * dim, bytes + 8);
  for (int t = 0; t < tokens; ++t) {
    float scale = 1;
    if (format.k_scales >= 0) {
      uint16_t half;
      __builtin_memcpy(&half, page + scales + 2 * t, 2);
      scale = half_to_float(half);
    }
    float* row = rows + t * dim;
    const int64_t first = static_cast<int64_t>(t) * dim;
    if (format.type == kTQ) {
      scale *= level_table(levels).step;
      for (int d = 0; d < dim; ++d) row[d] = scale * (bytes[8 + first + d] - kBias);
    } else {
      for (int d = 0; d < dim; ++d) row[d] = scale * stored_value(format.type, codes, first + d);
    }
  }
}

// Codes of one row: the number of boundaries below each value. Returns the row's scale.
float quantise_tq(const LevelTable& table, const float* row, int dim, uint8_t* codes) {
  VF squares = {};
  for (int d = 0; d < dim; d += LANES) squares += load(row + d) * load(row + d);
  const float norm = __builtin_sqrtf(sum(squares));
  const float rms = norm / __builtin_sqrtf(static_cast<float>(dim));
  const float unit = rms > 1.17549435e-38f ? rms : 1.17549435e-38f;
  VF chosen = {};
  for (int d = 0; d < dim; d += LANES) {
    const VF x = load(row + d) / unit;
    VI code = {}, centroid = splat(-kBias);
    for (int i = 0; i + 1 < table.levels; ++i) {
      const VI above = x > splat(table.boundaries[i]);
      code -= above;
      centroid += above & (table.bytes[i + 1] - table.bytes[i]);
    }
    const VF c = to_float(centroid);
    chosen += c * c;
    *reinterpret_cast<VBytes*>(codes + d) = __builtin_convertvector(code, VBytes);
  }
  // Below five levels the exact norm is no gain: see minima_kernels/formats/tq.py. A row of zeros may
  // choose nothing but a level at zero.
  const float length = table.step * __builtin_sqrtf(sum(chosen));
  const float scale = table.levels < 5 ? rms : length > 0 ? norm / length : 0.0f;
  return scale < 65504.0f ? scale : 65504.0f;
}

// Codes, one byte each, to the canonical bit stream.
void pack(const LevelTable& table, const uint8_t* codes, int64_t count, uint8_t* stream) {
  uint64_t bits = 0;
  int held = 0;
  const int digits = table.codes;
  for (int64_t i = 0; i < count; i += digits) {
    const int64_t present = count - i < digits ? count - i : digits;
    uint64_t word = 0;
    for (int64_t j = present - 1; j >= 0; --j) word = word * table.levels + codes[i + j];
    bits |= word << held;
    for (held += table.bits; held >= 8; held -= 8, bits >>= 8) *stream++ = static_cast<uint8_t>(bits);
  }
  if (held > 0) *stream = static_cast<uint8_t>(bits);
}

// e4m3 bits of x in [-448, 448], to nearest, ties to even.
INLINE VI to_e4m3(VF x) {
  const VI bits = as_int(x), magnitude = bits & 0x7fffffff;
  const VI normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  // Below 2**-6 the step is 2**-9: let an addition round to it.
  const VI small = as_int(as_float(magnitude) + 0x1.8p14f) - as_int(splat(0x1.8p14f));
  const VI code = as_float(magnitude) < splat(0x1p-6f) ? small : normal;
  return code | ((bits >> 24) & 0x80);
}

float quantise_fp8(const float* row, int dim, uint8_t* codes) {
  VF largest = {};
  for (int d = 0; d < dim; d += LANES) {
    const VF x = load(row + d);
    largest = vmax(largest, vmax(x, -x));
  }
  float scale = maximum(largest) / 448.0f;
  scale = half_to_float(float_to_half(scale > 0x1p-14f ? scale : 0x1p-14f));
  for (int d = 0; d < dim; d += LANES) {
    VF x = load(row + d) / scale;
    x = x < splat(-448.0f) ? splat(-448.0f) : x;
    x = x > splat(448.0f) ? splat(448.0f) : x;
    *reinterpret_cast<VBytes*>(codes + d) = __builtin_convertvector(to_e4m3(x), VBytes);
  }
  return scale;
}

// One row of a page whose format takes rows: codes at `codes`, scale at `scale`.
void store_row(int type, const float* row, int dim, uint8_t* codes, uint8_t* scale) {
  if (type == kFP8) {
    const uint16_t half = float_to_half(quantise_fp8(row, dim, codes));
    __builtin_memcpy(scale, &half, 2);
  } else if (type == kF32) {
    __builtin_memcpy(codes, row, 4 * dim);
  } else if (type == kF16) {
    for (int d = 0; d < dim; ++d) {
      const uint16_t half = float_to_half(row[d]);
      __builtin_memcpy(codes + 2 * d, &half, 2);
    }
  } else {
    for (int d = 0; d < dim; ++d) {
      uint32_t bits;
      __builtin_memcpy(&bits, row + d, 4);
      const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
      bits = is_nan ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1);
      const uint16_t top = static_cast<uint16_t>(bits >> 16);
      __builtin_memcpy(codes + 2 * d, &top, 2);
    }
  }
}

void append(const MinimaFormat& format, const MinimaGeometry& g, const float* k, const float* v,
            int64_t slot, uint8_t* share) {
  const int dim = g.head_dim;
  const int width = format.type == kFP8 ? dim : format.type == kF32 ? 4 * dim : 2 * dim;
  for (int head = 0; head < g.kv_heads; ++head) {
    store_row(format.type, k + head * dim, dim,
              share + format.k_codes + head * format.k_codes_head + slot * width,
              share + format.k_scales + head * format.k_scales_head + 2 * slot);
    store_row(format.type, v + head * dim, dim,
              share + format.v_codes + head * format.v_codes_head + slot * width,
              share + format.v_scales + head * format.v_scales_head + 2 * slot);
  }
}

// One head of one layer from a page to a page of another format, whose share is all zero bytes
// before the first head. `rows` holds page_size * D floats,
// `bytes` page_size * D + 16 bytes.
void retier(const MinimaFormat& from, const MinimaFormat& to, const MinimaGeometry& g, int head,
            const uint8_t* source, uint8_t* target, float* rows, uint8_t* bytes) {
  const int dim = g.head_dim, tokens = g.page_size;
  for (int part = 0; part < 2; ++part) {
    const bool key = part == 0;
    decode_codes(from, g, source, head, key, rows, bytes);
    if (key && from.k_mean >= 0) {
      const uint8_t* mean = source + from.k_mean + head * from.k_mean_head;
      for (int d = 0; d < dim; d += LANES) {
        const VF m = load_halves(mean + 2 * d);
        for (int t = 0; t < tokens; ++t) store(rows + t * dim + d, load(rows + t * dim + d) + m);
      }
    }
    uint8_t* codes = target + (key ? to.k_codes + head * to.k_codes_head
                                   : to.v_codes + head * to.v_codes_head);
    uint8_t* scales = target + (key ? to.k_scales + head * to.k_scales_head
                                    : to.v_scales + head * to.v_scales_head);
    if (to.type != kTQ) {
      const int width = to.type == kFP8 ? dim : to.type == kF32 ? 4 * dim : 2 * dim;
      for (int t = 0; t < tokens; ++t)
        store_row(to.type, rows + t * dim, dim, codes + static_cast<int64_t>(t) * width,
                  scales + 2 * t);
      continue;
    }
    if (key && to.k_mean >= 0) {
      uint8_t* mean = target + to.k_mean + head * to.k_mean_head;
      for (int d = 0; d < dim; d += LANES) {
        VF total = {};
        for (int t = 0; t < tokens; ++t) total += load(rows + t * dim + d);
        total /= static_cast<float>(tokens);
        for (int i = 0; i < LANES; ++i) {
          const uint16_t half = float_to_half(total[i]);
          __builtin_memcpy(mean + 2 * (d + i), &half, 2);
        }
        const VF stored = load_halves(mean + 2 * d);
        for (int t = 0; t < tokens; ++t)
          store(rows + t * dim + d, load(rows + t * dim + d) - stored);
      }
    }
    const LevelTable& table = level_table(key ? to.k_levels : to.v_levels);
    for (int t = 0; t < tokens; ++t) {
      const uint16_t half = float_to_half(quantise_tq(table, rows + t * dim, dim, bytes + t * dim));
      __builtin_memcpy(scales + 2 * t, &half, 2);
    }
    pack(table, bytes, static_cast<int64_t>(tokens) * dim, codes);
  }
}
