// Vector types of one level, written with the compiler's vector extensions. Included inside the
// level's namespace after LANES (32-bit lanes per vector) is defined.

typedef float VF __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef int32_t VI __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef uint32_t VU __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef int16_t VS __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef float VFU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t VIU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t VSU __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef int32_t Word __attribute__((may_alias, aligned(2)));

INLINE VF vmax(VF a, VF b);  // of the level

INLINE VF load(const float* p) { return *reinterpret_cast<const VFU*>(p); }
INLINE VI load(const int32_t* p) { return *reinterpret_cast<const VIU*>(p); }
INLINE VS load(const int16_t* p) { return *reinterpret_cast<const VSU*>(p); }
INLINE void store(float* p, VF v) { *reinterpret_cast<VFU*>(p) = v; }
INLINE void store(int32_t* p, VI v) { *reinterpret_cast<VIU*>(p) = v; }
INLINE VF splat(float x) { return x - VF{}; }
INLINE VI splat(int32_t x) { return x - VI{}; }
// Sums of products may pass 2**31 on their way to a result that does not.
INLINE VI wrapping_add(VI a, VI b) {
  return reinterpret_cast<VI>(reinterpret_cast<VU>(a) + reinterpret_cast<VU>(b));
}
INLINE VF to_float(VI v) { return __builtin_convertvector(v, VF); }
INLINE VI to_int(VF v) { return __builtin_convertvector(v, VI); }

// 2**x for x < 127, of N vectors at once; below -126 it gives 2**-126. Exact at 0; relative error
// below 3e-7. Step by step over all vectors, so that a constant is loaded once for all.
template <int N>
INLINE void exp2(VF (&x)[N]) {
  VF shifted[N], p[N];
  for (int i = 0; i < N; ++i) x[i] = vmax(x[i], splat(-126.0f));
  // Adding 1.5 * 2**23 leaves the nearest integer in the low bits of the sum.
  for (int i = 0; i < N; ++i) shifted[i] = x[i] + 0x1.8p23f;
  for (int i = 0; i < N; ++i) x[i] -= shifted[i] - 0x1.8p23f;
  for (int i = 0; i < N; ++i) p[i] = x[i] * 1.326465428e-3f + 9.671517651e-3f;
  for (int i = 0; i < N; ++i) p[i] = p[i] * x[i] + 5.550733985e-2f;
  for (int i = 0; i < N; ++i) p[i] = p[i] * x[i] + 2.402224198e-1f;
  for (int i = 0; i < N; ++i) p[i] = p[i] * x[i] + 6.931469774e-1f;
  for (int i = 0; i < N; ++i) p[i] = p[i] * x[i] + 1.0f;
  for (int i = 0; i < N; ++i)
    x[i] = reinterpret_cast<VF>(reinterpret_cast<VU>(p[i]) +
                                (reinterpret_cast<VU>(shifted[i]) << 23));
}

#include "half.inl"

INLINE uint16_t float_to_half(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u) return sign | (bits > 0x7f800000u ? 0x7e00 : 0x7c00);
  if (bits < 0x38800000u) {  // subnormal: let the float adder round at 2**-24
    float value;
    __builtin_memcpy(&value, &bits, 4);
    value += 0.5f;
    uint32_t rounded;
    __builtin_memcpy(&rounded, &value, 4);
    return sign | static_cast<uint16_t>(rounded - 0x3f000000u);
  }
  bits += 0xfffu + ((bits >> 13) & 1);  // to nearest, ties to even
  return sign | static_cast<uint16_t>((bits >> 13) - (112u << 10));
}

// e4m3 bits to their value; the two NaN codes, never written, read as +-480.
INLINE float e4m3_to_float(uint8_t code) {
  const uint32_t bits = (static_cast<uint32_t>(code & 0x80) << 24) |
                        (static_cast<uint32_t>(code & 0x7f) << 20);
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value * 0x1p120f;
}

// Value `index` of codes that carry one each: FP8 and the raw formats.
INLINE float stored_value(int type, const uint8_t* codes, int64_t index) {
  if (type == kFP8) return e4m3_to_float(codes[index]);
  float value;
  if (type == kF32) {
    __builtin_memcpy(&value, codes + 4 * index, 4);
    return value;
  }
  uint16_t half;
  __builtin_memcpy(&half, codes + 2 * index, 2);
  if (type == kF16) return half_to_float(half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
