// Vector types of one level, written with the compiler's vector extensions. Included inside the
// level's namespace after LANES (32-bit lanes per vector) is defined.

typedef float VF __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef int32_t VI __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef int16_t VS __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef int16_t VHalf __attribute__((vector_size(2 * LANES), aligned(2)));
typedef float VFU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t VIU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t VSU __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef int32_t Word __attribute__((may_alias, aligned(2)));

INLINE VF load(const float* p) { return *reinterpret_cast<const VFU*>(p); }
INLINE VI load(const int32_t* p) { return *reinterpret_cast<const VIU*>(p); }
INLINE VS load(const int16_t* p) { return *reinterpret_cast<const VSU*>(p); }
INLINE void store(float* p, VF v) { *reinterpret_cast<VFU*>(p) = v; }
INLINE void store(int32_t* p, VI v) { *reinterpret_cast<VIU*>(p) = v; }
INLINE VF splat(float x) { return x - VF{}; }
INLINE VI splat(int32_t x) { return x - VI{}; }
INLINE VF to_float(VI v) { return __builtin_convertvector(v, VF); }
INLINE VI to_int(VF v) { return __builtin_convertvector(v, VI); }
INLINE VF vmax(VF a, VF b) { return a > b ? a : b; }

INLINE float sum(VF v) {
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += v[i];
  return total;
}
INLINE int32_t sum(VI v) {
  int32_t total = 0;
  for (int i = 0; i < LANES; ++i) total += v[i];
  return total;
}
INLINE float maximum(VF v) {
  float best = v[0];
  for (int i = 1; i < LANES; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// 2**x for x <= 0; below -126 it gives 2**-126. Relative error below 3e-7.
INLINE VF exp2_negative(VF x) {
  x = vmax(x, splat(-126.0f));
  const VI whole = to_int(x - 0.5f);  // truncation rounds a negative number to the nearest
  const VF f = x - to_float(whole);
  VF p = splat(1.535336188e-4f);
  p = p * f + 1.339887440e-3f;
  p = p * f + 9.618437357e-3f;
  p = p * f + 5.550332548e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472028e-1f;
  p = p * f + 1.0f;
  return p * reinterpret_cast<VF>((whole + 127) << 23);
}

INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  uint32_t bits = (h & 0x7fffu) << 13;
  float value;
  if ((h & 0x7c00) == 0x7c00) {
    bits |= 0x7f800000u;
    __builtin_memcpy(&value, &bits, 4);
  } else {
    // Rebias by a multiplication: right for subnormal numbers too.
    __builtin_memcpy(&value, &bits, 4);
    value *= 0x1p112f;
  }
  __builtin_memcpy(&bits, &value, 4);
  bits |= sign;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

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
