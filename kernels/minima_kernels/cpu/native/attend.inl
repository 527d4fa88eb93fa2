// Attention of some query rows of one KV head over a run of pages, with a running softmax.
//
// A tile is at most kMaxTile tokens of consecutive pages. Its keys and values are expanded once
// for all rows into two scratch buffers, then rows are taken in blocks. In both products a vector
// holds LANES outputs and the other factor is broadcast:
//   scores  C[row][token]   = sum over channels of q[row][channel] * K[channel][token]
//   outputs C[row][channel] = sum over tokens of weight[row][token] * V[token][channel]
// TQ pages are multiplied in 16-bit integers (two factors per 32-bit lane, exact sums): queries
// have 15 bits and a step of their own per row, weights 15 bits per row and tile. The other formats
// are multiplied in float32.
//
// Tile layouts: keys   [token / LANES][channel or pair][LANES], pair = channels d and d + 4 of 8;
//               values [token or pair][channel / LANES][LANES], pair = tokens t and t + 8 of 16.
// So both are written in the order of the page's rows; a product steps through them by strides.
// Channels of values may be in an order of their own: outputs are kept in it for a run of pages.

// Quantises a row of queries to 15 bits, in the order of a tile's pairs. Gives its step, and what the
// bias of a tile adds to each of its products, with the sign turned.
void quantise(const float* q, int dim, int16_t* q16, float* step, int32_t* start) {
  VF best = {};
  for (int d = 0; d < dim; d += LANES) {
    const VF x = load(q + d);
    best = vmax(best, vmax(x, -x));
  }
  const float largest = maximum(best);
  const float inverse = largest > 0 ? 32767.0f / largest : 0.0f;
  VI all = {};
  int32_t whole[256];
  for (int d = 0; d < dim; d += LANES) {
    const VI rounded = round_to_int(load(q + d) * inverse);
    all += rounded;
    store(whole + d, rounded);
  }
  for (int d = 0; d < dim; d += 8) {
    for (int i = 0; i < 4; ++i) {
      q16[d + 2 * i] = static_cast<int16_t>(whole[d + i]);
      q16[d + 2 * i + 1] = static_cast<int16_t>(whole[d + i + 4]);
    }
  }
  *start = -kBias * sum(all);
  *step = largest / 32767.0f;
}

// Scratch of one thread. Rows of a block are contiguous.
struct Scratch {
  alignas(64) unsigned char keys[kTileBytes];
  alignas(64) unsigned char values[kTileBytes];
  alignas(64) float scores[kRowBlock * kMaxTile];  // before that the integer products
  alignas(64) int32_t weights[kRowBlock * kMaxTile / 2];  // pairs of 16-bit integers
  alignas(64) float outputs[kRowBlock * 256];      // or integer products
  alignas(64) float k_scales[kMaxTile];
  alignas(64) float v_scales[kMaxTile];
  alignas(64) float v_bits[kMaxTile];  // v_scale <= 2**v_bits
  alignas(64) float means[kMaxChunks][256];
  alignas(64) uint8_t bytes[kTileBytes / 2 + 2 * kSlack];
  int32_t weight_start[kRowBlock];
  float top[kRowBlock];   // weights of the tile are in units of 2**top
  float keep[kRowBlock];  // factor of the outputs so far
  float gain[kRowBlock];  // factor of the tile's
};

// Weights are below 2**15 with room for rounding.
constexpr float kWeightBits = 14.9999f;

// log2(2**a + 2**b); either may be -inf.
INLINE float log2_add(float a, float b) {
  const float high = a > b ? a : b, low = a > b ? b : a;
  if (!(low > -INFINITY)) return high;
  return high + __builtin_log2f(1.0f + __builtin_exp2f(low - high));
}

// FP16 numbers to float32, `columns` of them; those from `valid` on become zero.
void load_factors(const uint8_t* stored, int valid, int columns, float factor, float* target) {
  for (int t = 0; t < columns; t += LANES) {
    const VF x = load_halves(stored + 2 * t) * factor;
    store(target + t, t + LANES <= valid ? x : lane_numbers() < splat(valid - t) ? x : VF{});
  }
}

// How many tokens of a chunk a row may attend to: all valid ones, or for new tokens those up to its
// own; not positive if there are none.
INLINE int row_limit(const AttendJob& job, const Chunk& chunk, int row) {
  if (job.first_token < 0) return chunk.tokens;
  const int own = static_cast<int>(job.first_token + row / job.geometry->group) - chunk.first + 1;
  return own < chunk.tokens ? own : chunk.tokens;
}

// Scores of a row from column `at` on become weights, the first `limit` of them if `masked`: in
// float32 times the scale of their values, or in integers. Adds up both.
template <typename Element, bool masked, int COLUMNS>
INLINE void weigh(float* row, int32_t* weights, const float* v_scales, int at, int limit, float top,
                  VF& total, VI& weight_total) {
  constexpr int N = COLUMNS / LANES;
  VF p[N];
  for (int i = 0; i < N; ++i) p[i] = load(row + at + i * LANES) - top;
  exp2(p);
  if (masked) {
    for (int i = 0; i < N; ++i)
      p[i] = lane_numbers() < splat(limit - i * LANES) ? p[i] : VF{};
  }
  for (int i = 0; i < N; ++i) total += p[i];
  for (int i = 0; i < N; ++i) p[i] *= load(v_scales + at + i * LANES);
  if constexpr (sizeof(Element) == 2) {
    VI w[N];
    for (int i = 0; i < N; ++i) w[i] = round_to_int(p[i]);
    for (int i = 0; i < N; ++i) weight_total += w[i];
    for (int i = 0; i < COLUMNS / 16; ++i)
      store_pairs(weights + at / 2 + 8 * i, w + i * 16 / LANES);
  } else {
    for (int i = 0; i < N; ++i) store(row + at + i * LANES, p[i]);
  }
}

// `masked`: some columns of the tile are not valid for some rows.
template <typename Element, bool masked>
void attend_tile(const AttendJob& job, const MinimaFormat& format, const Chunk* chunks,
                 int num_chunks, int columns, Scratch& s) {
  constexpr bool is_tq = sizeof(Element) == 2;
  const MinimaGeometry& g = *job.geometry;
  const int dim = g.head_dim;
  Element* keys = reinterpret_cast<Element*>(s.keys);
  // One block of rows is done with the keys when it comes to the values: the same lines of the
  // first-level cache serve both. Further blocks need both tiles.
  Element* values = job.rows <= kRowBlock ? keys : reinterpret_cast<Element*>(s.values);
  const Strides key_strides = {is_tq ? dim / 2 : dim, 1}, value_strides = {1, dim / LANES};

  // The last valid token may leave lanes of a 16-column group empty: their scores are masked.
  for (int i = 0; i < num_chunks; ++i) {
    const Chunk& chunk = chunks[i];
    const uint8_t* k = chunk.page + format.k_codes + job.head * format.k_codes_head;
    expand_keys(format, k, chunk, dim, keys, s.bytes);
    float k_factor = 1, v_factor = 1;
    if (is_tq) {
      k_factor = level_table(format.k_levels).step;
      v_factor = level_table(format.v_levels).step;
    } else if (format.type == kFP8) {
      k_factor = v_factor = 0x1p120f;
    }
    if (format.k_scales >= 0) {
      const int64_t at = 2 * chunk.first;
      const uint8_t* k_scales =
          chunk.page + format.k_scales + job.head * format.k_scales_head + at;
      const uint8_t* v_scales =
          chunk.page + format.v_scales + job.head * format.v_scales_head + at;
      load_factors(k_scales, chunk.tokens, chunk.columns, k_factor, s.k_scales + chunk.column);
      load_factors(v_scales, chunk.tokens, chunk.columns, v_factor, s.v_scales + chunk.column);
      ask_for(k_scales + chunk.ahead, 2 * chunk.columns);
      ask_for(v_scales + chunk.ahead, 2 * chunk.columns);
      if (is_tq) {
        for (int t = chunk.column; t < chunk.column + chunk.columns; t += LANES) {
          // A float's bits are its logarithm, but for up to 0.0861 within each power of two. At least
          // 2**-40, so that sums stay finite where all values are zero.
          const VF bits = to_float(reinterpret_cast<VI>(load(s.v_scales + t))) * 0x1p-23f;
          store(s.v_bits + t, vmax(bits - 126.9139f, splat(-40.0f)));
        }
      }
    } else {
      for (int t = 0; t < chunk.columns; ++t) {
        s.k_scales[chunk.column + t] = 1;
        s.v_scales[chunk.column + t] = t < chunk.tokens ? 1.0f : 0.0f;
      }
    }
    if (format.k_mean >= 0) {
      const uint8_t* mean = chunk.page + format.k_mean + job.head * format.k_mean_head;
      load_factors(mean, dim, dim, 1.0f, s.means[i]);
      ask_for(mean + chunk.ahead, 2 * dim);
    }
  }

  // Rows of tokens before a causal tile have nothing in it.
  int block = 0;
  if (job.first_token >= 0 && chunks[0].first > job.first_token)
    block = static_cast<int>(chunks[0].first - job.first_token) * g.group;
  bool values_expanded = false;
  for (; block < job.rows; block += kRowBlock) {
    const int rows = job.rows - block < kRowBlock ? job.rows - block : kRowBlock;
    const float* q = job.q + static_cast<int64_t>(block) * dim;
    float* out = job.out + static_cast<int64_t>(block) * dim;
    float* scores = s.scores;
    if constexpr (is_tq) {
      const int16_t* q16 = job.q16 + static_cast<int64_t>(block) * dim;
      multiply(keys, key_strides, columns / LANES, dim, q16, dim, job.q_start + block,
               reinterpret_cast<int32_t*>(scores), kMaxTile, rows);
    } else {
      multiply(keys, key_strides, columns / LANES, dim, q, dim, scores, kMaxTile, rows);
    }

    // Pass by pass over all rows: a row's reductions are long chains, and the processor can only
    // overlap those of different rows if they are close together.
    for (int r = 0; r < rows; ++r) {
      float* row = scores + r * kMaxTile;
      const VF q_step = splat(is_tq ? job.q_step[block + r] : 0.0f);
      VF best = splat(-INFINITY);
      for (int i = 0; i < num_chunks; ++i) {
        const Chunk& chunk = chunks[i];
        float shift = 0;
        if (format.k_mean >= 0) {
          VF total = {};
          for (int d = 0; d < dim; d += LANES) total += load(q + r * dim + d) * load(s.means[i] + d);
          shift = sum(total);
        }
        for (int at = chunk.column; at < chunk.column + chunk.columns; at += LANES) {
          VF x;
          if constexpr (is_tq) {
            const VF exact = to_float(load(reinterpret_cast<int32_t*>(row) + at));
            x = exact * (load(s.k_scales + at) * q_step) + shift;
          } else {
            x = load(row + at) * load(s.k_scales + at) + shift;
          }
          if constexpr (masked) {
            const int limit = row_limit(job, chunk, block + r) - (at - chunk.column);
            x = lane_numbers() < splat(limit) ? x : splat(-INFINITY);
          }
          store(row + at, x);
          best = vmax(best, is_tq ? x + load(s.v_bits + at) : x);
        }
      }
      s.top[r] = is_tq ? maximum(best) - kWeightBits : maximum(best);
    }
    for (int r = 0; r < rows; ++r) {
      const float old_max = job.max[block + r];
      const float new_max = s.top[r] > old_max ? s.top[r] : old_max;
      s.keep[r] = old_max - new_max;
      s.gain[r] = s.top[r] - new_max;
      job.max[block + r] = new_max;
    }
    for (int r = 0; r < rows; r += LANES) {
      VF factors[] = {load(s.keep + r), load(s.gain + r)};
      exp2(factors);
      store(s.keep + r, factors[0]);
      store(s.gain + r, factors[1]);
    }
    for (int r = 0; r < rows; ++r) {
      float* row = scores + r * kMaxTile;
      int32_t* weights = s.weights + r * (kMaxTile / 2);
      const float top = s.top[r];
      VF row_total = {};
      VI weight_total = {};
      for (int i = 0; i < num_chunks; ++i) {
        const Chunk& chunk = chunks[i];
        const int limit = masked ? row_limit(job, chunk, block + r) : 0;
        VF chunk_total = {};
        int at = 0;
        for (; at + 32 <= chunk.columns; at += 32)
          weigh<Element, masked, 32>(row, weights, s.v_scales, chunk.column + at, limit - at, top,
                                     chunk_total, weight_total);
        if (at < chunk.columns)
          weigh<Element, masked, 16>(row, weights, s.v_scales, chunk.column + at, limit - at, top,
                                     chunk_total, weight_total);
        row_total += chunk_total;
        if (job.page_sums) {
          float& entry =
              job.page_sums[static_cast<int64_t>(chunk.page_index) * job.rows + block + r];
          entry = log2_add(entry, top + __builtin_log2f(sum(chunk_total)));
        }
      }
      job.sum[block + r] = job.sum[block + r] * s.keep[r] + sum(row_total) * s.gain[r];
      if constexpr (is_tq) s.weight_start[r] = -kBias * sum(weight_total);
    }

    for (int i = 0; !values_expanded && i < num_chunks; ++i)
      expand_values(format,
                    chunks[i].page + format.v_codes + job.head * format.v_codes_head, chunks[i],
                    dim, values, s.bytes);
    values_expanded = true;
    if constexpr (is_tq) {
      multiply(values, value_strides, dim / LANES, columns,
               reinterpret_cast<const int16_t*>(s.weights), kMaxTile, s.weight_start,
               reinterpret_cast<int32_t*>(s.outputs), dim, rows);
    } else {
      multiply(values, value_strides, dim / LANES, columns, scores, kMaxTile, s.outputs, dim, rows);
    }
    for (int r = 0; r < rows; ++r) {
      float* o = out + static_cast<int64_t>(r) * dim;
      const float keep = s.keep[r], gain = s.gain[r];
      for (int d = 0; d < dim; d += LANES) {
        VF x;
        if constexpr (is_tq) {
          x = to_float(load(reinterpret_cast<int32_t*>(s.outputs) + r * dim + d));
        } else {
          x = load(s.outputs + r * dim + d);
        }
        store(o + d, load(o + d) * keep + x * gain);
      }
    }
  }
}

template <typename Element>
void attend_pages(const AttendJob& job, const MinimaFormat& format, const uint8_t* arena,
                  const int64_t* pages, int64_t num_pages, int last_len, int64_t position,
                  Scratch& scratch) {
  const int page_size = job.geometry->page_size;
  int limit = kTileBytes / static_cast<int>(sizeof(Element)) / job.geometry->head_dim / 16 * 16;
  if (limit > kMaxTile) limit = kMaxTile;
  // Several small pages share a tile; groups start at multiples of their length in the sequence,
  // so that results do not depend on how a run of pages was cut.
  const int per_tile = page_size < limit ? limit / page_size : 1;
  Chunk chunks[kMaxChunks];
  int num_chunks = 0, columns = 0;
  for (int64_t i = 0; i < num_pages; ++i) {
    const int length = i + 1 == num_pages ? last_len : page_size;
    // A tile ahead: in the same page, or in that of the next group of pages.
    const int64_t next = i + per_tile < num_pages ? i + per_tile : i;
    for (int first = 0; first < length; first += limit) {
      if (job.last_token >= 0 && first > job.last_token) break;
      const int tokens = length - first < limit ? length - first : limit;
      const int rounded = (tokens + 15) / 16 * 16;
      chunks[num_chunks++] = Chunk{arena + pages[i], static_cast<int>(i), first, tokens, rounded,
                                   columns, pages[next] - pages[i]};
      columns += rounded;
      const bool group_ends = (position + i + 1) % per_tile == 0 || i + 1 == num_pages;
      if (group_ends || first + limit < length) {
        const bool diagonal = job.first_token >= 0 && first + tokens > job.first_token;
        if (tokens < rounded || diagonal)
          attend_tile<Element, true>(job, format, chunks, num_chunks, columns, scratch);
        else
          attend_tile<Element, false>(job, format, chunks, num_chunks, columns, scratch);
        num_chunks = columns = 0;
      }
    }
  }
}

void attend(const AttendJob& job, const MinimaFormat& format, const uint8_t* arena,
            const int64_t* pages, int64_t num_pages, int last_len, int64_t position,
            void* scratch) {
  Scratch& s = *static_cast<Scratch*>(scratch);
  const int dim = job.geometry->head_dim, turned = turned_channels(format, dim);
  turn_channels(job.out, job.rows, dim, turned);
  if (format.type == kTQ)
    attend_pages<int16_t>(job, format, arena, pages, num_pages, last_len, position, s);
  else
    attend_pages<float>(job, format, arena, pages, num_pages, last_len, position, s);
  turn_channels(job.out, job.rows, dim, turned);
}
