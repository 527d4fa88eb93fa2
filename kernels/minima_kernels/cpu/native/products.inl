// Rows times a tile, in 16-bit integers or in float32: see attend.inl for the layouts.

// Where the vectors of a tile lie: strides in vectors from one output to the next, and from one
// step of the sum to the next.
struct Strides {
  int output, step;
};

template <int NV, int RB>
INLINE void block_i16(const int16_t* tile, Strides strides, int pairs, const int16_t* a, int lda,
                      const int32_t* start, int32_t* c, int ldc) {
  VI sums[NV][RB];
  for (int r = 0; r < RB; ++r)
    for (int v = 0; v < NV; ++v) sums[v][r] = splat(start[r]);
  for (int k = 0; k < pairs; ++k) {
    VS b[NV];
    for (int v = 0; v < NV; ++v) b[v] = load(tile + (v * strides.output + k * strides.step) * 2 * LANES);
    for (int r = 0; r < RB; ++r) {
      const VI pair = splat(*reinterpret_cast<const Word*>(a + r * lda + 2 * k));
      for (int v = 0; v < NV; ++v) sums[v][r] = dot(sums[v][r], b[v], reinterpret_cast<VS>(pair));
    }
  }
  for (int r = 0; r < RB; ++r)
    for (int v = 0; v < NV; ++v) store(c + r * ldc + v * LANES, sums[v][r]);
}

template <int NV, int RB>
INLINE void block_f32(const float* tile, Strides strides, int depth, const float* a, int lda,
                      float* c, int ldc) {
  VF sums[NV][RB] = {};
  for (int k = 0; k < depth; ++k) {
    VF b[NV];
    for (int v = 0; v < NV; ++v) b[v] = load(tile + (v * strides.output + k * strides.step) * LANES);
    for (int r = 0; r < RB; ++r) {
      const VF factor = splat(a[r * lda + k]);
      for (int v = 0; v < NV; ++v) sums[v][r] += b[v] * factor;
    }
  }
  for (int r = 0; r < RB; ++r)
    for (int v = 0; v < NV; ++v) store(c + r * ldc + v * LANES, sums[v][r]);
}

template <int RB>
void rows_i16(const int16_t* tile, Strides strides, int vectors, int pairs, const int16_t* a,
              int lda, const int32_t* start, int32_t* c, int ldc) {
  const int next = strides.output * 2 * LANES;
  constexpr int NV = RB == 1 ? 8 : RB <= 3 ? 4 : 2;
  int v = 0;
  for (; v + NV <= vectors; v += NV)
    block_i16<NV, RB>(tile + v * next, strides, pairs, a, lda, start, c + v * LANES, ldc);
  if (NV > 4 && v + 4 <= vectors) {
    block_i16<4, RB>(tile + v * next, strides, pairs, a, lda, start, c + v * LANES, ldc);
    v += 4;
  }
  if (NV > 2 && v + 2 <= vectors) {
    block_i16<2, RB>(tile + v * next, strides, pairs, a, lda, start, c + v * LANES, ldc);
    v += 2;
  }
  if (v < vectors)
    block_i16<1, RB>(tile + v * next, strides, pairs, a, lda, start, c + v * LANES, ldc);
}

template <int RB>
void rows_f32(const float* tile, Strides strides, int vectors, int depth, const float* a, int lda,
              float* c, int ldc) {
  const int next = strides.output * LANES;
  constexpr int NV = RB == 1 ? 8 : RB <= 3 ? 4 : 2;
  int v = 0;
  for (; v + NV <= vectors; v += NV)
    block_f32<NV, RB>(tile + v * next, strides, depth, a, lda, c + v * LANES, ldc);
  if (NV > 4 && v + 4 <= vectors) {
    block_f32<4, RB>(tile + v * next, strides, depth, a, lda, c + v * LANES, ldc);
    v += 4;
  }
  if (NV > 2 && v + 2 <= vectors) {
    block_f32<2, RB>(tile + v * next, strides, depth, a, lda, c + v * LANES, ldc);
    v += 2;
  }
  if (v < vectors)
    block_f32<1, RB>(tile + v * next, strides, depth, a, lda, c + v * LANES, ldc);
}

// C = A x tile, plus start[row] in every column of a row.
void multiply(const int16_t* tile, Strides strides, int vectors, int depth, const int16_t* a,
              int lda, const int32_t* start, int32_t* c, int ldc, int rows) {
  const int pairs = depth / 2;
  for (; rows >= 6; rows -= 6, a += 6 * lda, start += 6, c += 6 * ldc)
    rows_i16<6>(tile, strides, vectors, pairs, a, lda, start, c, ldc);
  switch (rows) {
    case 5: rows_i16<5>(tile, strides, vectors, pairs, a, lda, start, c, ldc); break;
    case 4: rows_i16<4>(tile, strides, vectors, pairs, a, lda, start, c, ldc); break;
    case 3: rows_i16<3>(tile, strides, vectors, pairs, a, lda, start, c, ldc); break;
    case 2: rows_i16<2>(tile, strides, vectors, pairs, a, lda, start, c, ldc); break;
    case 1: rows_i16<1>(tile, strides, vectors, pairs, a, lda, start, c, ldc); break;
    default: break;
  }
}

void multiply(const float* tile, Strides strides, int vectors, int depth, const float* a, int lda,
              float* c, int ldc, int rows) {
  for (; rows >= 6; rows -= 6, a += 6 * lda, c += 6 * ldc)
    rows_f32<6>(tile, strides, vectors, depth, a, lda, c, ldc);
  switch (rows) {
    case 5: rows_f32<5>(tile, strides, vectors, depth, a, lda, c, ldc); break;
    case 4: rows_f32<4>(tile, strides, vectors, depth, a, lda, c, ldc); break;
    case 3: rows_f32<3>(tile, strides, vectors, depth, a, lda, c, ldc); break;
    case 2: rows_f32<2>(tile, strides, vectors, depth, a, lda, c, ldc); break;
    case 1: rows_f32<1>(tile, strides, vectors, depth, a, lda, c, ldc); break;
    default: break;
  }
}
