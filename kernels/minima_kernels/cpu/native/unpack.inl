// Codes of a stream to bytes (centroid + kBias), row-major [tokens, D]: any level count, any level
// of instructions. `out` may be written up to 8 bytes before its start and behind its end.

INLINE uint32_t load_bits(const uint8_t* stream, int64_t bit) {
  uint32_t word;
  __builtin_memcpy(&word, stream + (bit >> 3), 4);
  return word >> (bit & 7);
}

void unpack_bytes(const LevelTable& table, const uint8_t* stream, int64_t first, int64_t count,
                  uint8_t* out) {
  if (table.planar) {
    const int bits = __builtin_ctz(table.levels);
    for (int64_t i = 0; i < count; ++i)
      out[i] = table.bytes[load_bits(stream, (first + i) * bits) & (table.levels - 1)];
    return;
  }
  const uint32_t mask = (1u << table.step_bits) - 1;
  const int64_t word = first / table.codes;
  uint8_t* end = out + count;
  out -= first % table.codes;
  for (int64_t bit = word * table.bits; out < end; bit += table.step_bits, out += table.step_codes) {
    const uint32_t digits = load_bits(stream, bit) & mask;
    if (table.high) {
      const uint32_t high = static_cast<uint32_t>(digits * table.reciprocal >> 32);
      __builtin_memcpy(out, table.low[digits - high * table.radix], 8);
      __builtin_memcpy(out + table.low_codes, table.high[high], 8);
    } else {
      __builtin_memcpy(out, table.low[digits], 8);
    }
  }
}
