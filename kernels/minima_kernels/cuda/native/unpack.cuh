// Codes to bytes by table.
// Macros: the tables K_T0, K_T1, K_U0, K_U1 and V_T0 ...
#pragma once
#include "common.cuh"

// Four codes become four signed bytes by one byte permutation. Sixteen levels need two tables: bit 3 of
// a nibble, which holds the lowest bit of the code, makes `prmt` give only the sign of the entry, and the
// entries allow for that; the two results are summed by the MMA itself.
struct KTable {
  static constexpr uint32_t T0 = K_T0, T1 = K_T1, U0 = K_U0, U1 = K_U1;
};
struct VTable {
  static constexpr uint32_t T0 = V_T0, T1 = V_T1, U0 = V_U0, U1 = V_U1;
};

// A constant as a register that the compiler cannot make again: it would do so for every look-up.
__device__ __forceinline__ uint32_t hold(uint32_t constant, uint32_t* place) {
  if ((threadIdx.x & 31) == 0) *place = constant;
  __syncwarp();
  return *reinterpret_cast<volatile uint32_t*>(place);
}

// BITS words to eight registers of four bytes; `t0` is Table::T0 (see `hold`); `r` holds a second set behind the first for 4 bits.
template <int BITS, typename Table>
__device__ __forceinline__ void unpack(const uint32_t* w, uint32_t* r, uint32_t t0 = Table::T0) {
  if constexpr (BITS == 2) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t s = w[i] & 0x33333333u, t = (w[i] >> 2) & 0x33333333u;
      r[4 * i] = prmt(t0, 0, s);
      r[4 * i + 1] = prmt(t0, 0, s >> 16);
      r[4 * i + 2] = prmt(t0, 0, t);
      r[4 * i + 3] = prmt(t0, 0, t >> 16);
    }
  } else if constexpr (BITS == 3) {
    uint32_t last = (w[0] >> 3) & 0x11111111u;
    last = ((w[1] >> 2) & 0x22222222u) | last;
    last = ((w[2] >> 1) & 0x44444444u) | last;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t s = i < 3 ? w[i] & 0x77777777u : last;
      r[2 * i] = prmt(t0, Table::T1, s);
      r[2 * i + 1] = prmt(t0, Table::T1, s >> 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t s = w[i], t = s ^ 0x88888888u;
      r[2 * i] = prmt(Table::T0, Table::T1, s);
      r[2 * i + 1] = prmt(Table::T0, Table::T1, s >> 16);
      r[8 + 2 * i] = prmt(Table::U0, Table::U1, t);
      r[8 + 2 * i + 1] = prmt(Table::U0, Table::U1, t >> 16);
    }
  }
}

// The same as bytes in one set of registers. For 4 bits the tables hold the plain values: of the two entries
// looked up one is a value, the other all ones where values at this place are negative, else zero.
template <int BITS, typename Table>
__device__ __forceinline__ void unpack_bytes(const uint32_t* w, uint32_t* r) {
  if constexpr (BITS != 4) {
    unpack<BITS, Table>(w, r);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t s = w[i / 2] >> 16 * (i % 2), t = s ^ 0x88888888u;
      const uint32_t a = prmt(Table::T0, Table::T1, s), b = prmt(Table::U0, Table::U1, t);
      const uint32_t positive = prmt(0u, 0xFFFFFFFFu, s);
      r[i] = (a & b) | (a & positive) | (b & positive);
    }
  }
}
