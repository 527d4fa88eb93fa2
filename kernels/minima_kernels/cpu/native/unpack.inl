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
  const uint32_t mask = (1u << table.bits) - 1;
  int64_t word = first / table.codes;
  out -= first % table.codes;
  const uint8_t* end = out + first % table.codes + count;
  for (; out < end; ++word, out += table.codes) {
    const uint32_t digits = load_bits(stream, word * table.bits) & mask;
    if (table.high) {
      __builtin_memcpy(out, table.low[digits % table.radix], 8);
      __builtin_memcpy(out + table.low_codes, table.high[digits / table.radix], 8);
    } else {
      __builtin_memcpy(out, table.low[digits], 8);
    }
  }
}
