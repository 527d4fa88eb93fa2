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
template <int N>
void multiply(float* d, const Rows& a, const Tile& b) {
  const int j = current->lane & 3;
  const float* value = half_values();
  for (int i = 0; i < N / 8; i++)
    for (int c = 0; c < 2; c++)
      for (int part = 0; part < 2; part++) {
        const auto* y = reinterpret_cast<const uint16_t*>(b.row(8 * i + 2 * j + c, 16 * part));
        for (int r = 0; r < 2; r++) {
          const auto* x = reinterpret_cast<const uint16_t*>(a.bytes[r] + 16 * part);
          float sum = 0.f;
          for (int k = 0; k < 8; k++) sum += value[x[k]] * value[y[k]];
          d[i * 4 + 2 * r + c] += sum;
        }
      }
}

template <int N, typename T>
void issue(T* d, std::function<Rows()> rows, uint64_t b) {
  auto run = [=] { multiply<N>(d, rows(), Tile(b)); };
  if (by_chance() && current->products.empty()) return run();
  auto& list = current->products;
  const bool is_first = std::none_of(list.begin(), list.end(), [&](const Product& p) { return p.sums == d; });
  std::vector<uint8_t> before;
  if (is_first) before.assign(reinterpret_cast<uint8_t*>(d), reinterpret_cast<uint8_t*>(d) + N / 2 * sizeof(T));
  list.push_back({0, d, N / 2 * sizeof(T), before, run});
}
template <int N, typename T>
void issue(T* d, const uint32_t* a, uint64_t b) {
  const Rows rows = rows_of_registers(a);
  issue<N>(d, [=] { return rows; }, b);
}
template <int N, typename T>
void issue(T* d, uint64_t a, uint64_t b) {
  exchange(0, "a product of tiles");
  issue<N>(d, [=] { return rows_of_tile(Tile(a)); }, b);
}

}  // namespace emulator

inline void wgmma_fence() { emulator::exchange(0, "wgmma_fence"); }
inline void wgmma_commit() {
  emulator::exchange(0, "wgmma_commit");
  emulator::current->groups++;
  for (emulator::Product& product : emulator::current->products)
    if (!product.rank) product.rank = emulator::current->groups;
}
template <int PENDING>
inline void wgmma_wait() {
  emulator::exchange(0, "wgmma_wait");
  emulator::finish_products(*emulator::current, PENDING);
}
template <typename A>
inline void wgmma_s8_n64(int* d, A a, uint64_t b) { emulator::issue<64>(d, a, b); }
template <typename A>
inline void wgmma_s8_n16(int* d, A a, uint64_t b) { emulator::issue<16>(d, a, b); }
template <int N>
inline void wgmma_f16(float* d, const uint32_t* a, uint64_t b) {
  if constexpr (N == 64) {
    emulator::issue<64>(d, a, b);
  } else {
    emulator::issue<128>(d, a, b);
    if constexpr (N == 256) wgmma_f16<128>(d + 64, a, b + 128);
  }
}
