// Products of warpgroups: each lane works out its own sums, from tiles as they are when the product runs.
#pragma once
#include <cuda_fp16.h>

#include "emulator.h"

namespace emulator {

struct Tile {
  uint32_t address, along_k, along_n;
  explicit Tile(uint64_t d)
      : address((uint32_t)(d & 0x3FFF) << 4), along_k((uint32_t)(d >> 16 & 0x3FFF) << 4),
        along_n((uint32_t)(d >> 32 & 0x3FFF) << 4) {}
  const uint8_t* row(int n, int k_byte) const {  // 16 bytes along K
    return dynamic_shared + address + k_byte / 16 * along_k + n / 8 * along_n + n % 8 * 16;
  }
  const uint8_t* column(int k, int n) const {  // of 16-bit values that lie along N
    return dynamic_shared + address + k / 8 * along_k + k % 8 * 16 + n / 8 * along_n + n % 8 * 2;
  }
};

inline const float* half_values() {
  static const std::vector<float> table = [] {
    std::vector<float> t(1 << 16);
    for (int i = 0; i < 1 << 16; i++) t[i] = __half2float(__ushort_as_half((unsigned short)i));
    return t;
  }();
  return table.data();
}

// 32 bytes of rows g and g + 8 of this warp's 16.
struct Rows {
  uint8_t bytes[2][32];
};

inline Rows rows_of_registers(const uint32_t* a) {
  const int quad = current->lane & ~3;
  Rows rows;
  for (int i = 0; i < 4; i++) {
    const uint32_t* all = exchange(a[i], "a product");
    for (int j = 0; j < 4; j++) memcpy(rows.bytes[i & 1] + (i >> 1) * 16 + 4 * j, &all[quad + j], 4);
  }
  return rows;
}
inline Rows rows_of_tile(const Tile& tile) {
  const int row = (current->thread.x >> 5 & 3) * 16 + (current->lane >> 2);
  Rows rows;
  for (int i = 0; i < 4; i++) memcpy(rows.bytes[i & 1] + (i >> 1) * 16, tile.row(row + 8 * (i & 1), i >> 1 << 4), 16);
  return rows;
}

template <int N>
void multiply(int* d, const Rows& a, const Tile& b) {
  const int j = current->lane & 3;
  for (int i = 0; i < N / 8; i++)
    for (int c = 0; c < 2; c++)
      for (int part = 0; part < 2; part++) {
        const auto* y = reinterpret_cast<const int8_t*>(b.row(8 * i + 2 * j + c, 16 * part));
        for (int r = 0; r < 2; r++) {
          const auto* x = reinterpret_cast<const int8_t*>(a.bytes[r] + 16 * part);
          int sum = 0;
          for (int k = 0; k < 16; k++) sum += x[k] * y[k];
          d[i * 4 + 2 * r + c] += sum;
        }
      }
}
template <int N, bool TRANSPOSED>
void multiply(float* d, const Rows& a, const Tile& b) {
  const int j = current->lane & 3;
  const float* value = half_values();
  for (int i = 0; i < N / 8; i++)
    for (int c = 0; c < 2; c++)
      for (int part = 0; part < 2; part++) {
        const int n = 8 * i + 2 * j + c;
        uint16_t y[8];
        if constexpr (TRANSPOSED)
          for (int k = 0; k < 8; k++) memcpy(&y[k], b.column(8 * part + k, n), 2);
        else
          memcpy(y, b.row(n, 16 * part), 16);
        for (int r = 0; r < 2; r++) {
          const auto* x = reinterpret_cast<const uint16_t*>(a.bytes[r] + 16 * part);
          float sum = 0.f;
          for (int k = 0; k < 8; k++) sum += value[x[k]] * value[y[k]];
          d[i * 4 + 2 * r + c] += sum;
        }
      }
}

// A product that adds to sums `d` of this lane, at once or later.
template <int N, typename T>
void issue(T* d, std::function<void()> run) {
  if (by_chance() && current->products.empty()) return run();
  auto& list = current->products;
  const bool is_first = std::none_of(list.begin(), list.end(), [&](const Product& p) { return p.sums == d; });
  std::vector<uint8_t> before;
  if (is_first) before.assign(reinterpret_cast<uint8_t*>(d), reinterpret_cast<uint8_t*>(d) + N / 2 * sizeof(T));
  list.push_back({0, d, N / 2 * sizeof(T), before, run});
}
// Registers are read now, tiles when the product runs.
inline std::function<Rows()> read_rows(const uint32_t* a) {
  const Rows rows = rows_of_registers(a);
  return [=] { return rows; };
}
inline std::function<Rows()> read_rows(uint64_t a) {
  exchange(0, "a product of tiles");
  return [=] { return rows_of_tile(Tile(a)); };
}
template <int N, bool ADD, typename A>
void issue_bytes(int* d, A a, uint64_t b) {
  const auto rows = read_rows(a);
  issue<N>(d, [=] {
    if (!ADD) std::fill(d, d + N / 2, 0);
    multiply<N>(d, rows(), Tile(b));
  });
}
template <int N, bool TRANSPOSED, bool ADD, typename A>
void issue_halves(float* d, A a, uint64_t b) {
  const auto rows = read_rows(a);
  issue<N>(d, [=] {
    if (!ADD) std::fill(d, d + N / 2, 0.f);
    multiply<N, TRANSPOSED>(d, rows(), Tile(b));
  });
}

}  // namespace emulator

inline void wgmma_fence() { emulator::exchange(0, "wgmma_fence"); }
inline void wgmma_commit() {
  emulator::exchange(0, "wgmma_commit");
  emulator::current->groups++;
  for (emulator::Product& product : emulator::current->products)
    if (!product.rank) product.rank = emulator::current->groups;
}
template <int COUNT>
inline void settle(float*) {}
template <int PENDING>
inline void wgmma_wait() {
  emulator::exchange(0, "wgmma_wait");
  emulator::finish_products(*emulator::current, PENDING);
}
template <bool ADD = true, typename A>
inline void wgmma_s8_n64(int* d, A a, uint64_t b) { emulator::issue_bytes<64, ADD>(d, a, b); }
template <bool ADD = true, typename A>
inline void wgmma_s8_n16(int* d, A a, uint64_t b) { emulator::issue_bytes<16, ADD>(d, a, b); }
template <int N, bool TRANSPOSED = false, bool ADD = true>
inline void wgmma_f16(float* d, const uint32_t* a, uint64_t b) {
  emulator::issue_halves<N == 64 ? 64 : 128, TRANSPOSED, ADD>(d, a, b);
  if constexpr (N == 256) wgmma_f16<128, TRANSPOSED, ADD>(d + 64, a, b + (TRANSPOSED ? 1024 : 128));
}
template <bool ADD>
inline void wgmma_f16_n64(float* d, uint64_t a, uint64_t b) { emulator::issue_halves<64, false, ADD>(d, a, b); }
