// float16 bits to their value, where no instruction does it.

INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  uint32_t bits = (h & 0x7fffu) << 13;
  float value = 0;
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
