// Warpgroup products of Hopper: both operands in tiles of core matrices (8 rows of 16 bytes) without
// swizzle, or A in registers.
#pragma once
#include <stdint.h>

// A tile at `address`: bytes from one core matrix to the next along K, and along M or N.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, uint32_t along_k, uint32_t along_n) {
  return (uint64_t)((address & 0x3FFFF) >> 4) | ((uint64_t)(along_k >> 4) << 16) | ((uint64_t)(along_n >> 4) << 32);
}

#ifndef __CUDACC__
#include "emulated_wgmma.h"
#else
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING committed groups run.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the order of what makes or reads `d` and of waits: reading sums in front of one would end the pipeline of
// products, and work that should run under a product is not to be put off until behind the wait for it.
template <int COUNT>
__device__ __forceinline__ void settle(float* d) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i]));
}

#define OUT4(C, d, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define OUT16(C, d, i) OUT4(C, d, i), OUT4(C, d, i + 4), OUT4(C, d, i + 8), OUT4(C, d, i + 12)
#define INT_(x) "+r"(x)
#define FLOAT_(x) "+f"(x)
#define D0_7 "%0,%1,%2,%3,%4,%5,%6,%7"
#define D0_31                                                                                                     \
  D0_7 ",%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define D32_63                                                                                                    \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58," \
  "%59,%60,%61,%62,%63"

// int32 [64 x 64] += int8 A * int8 B, 32 deep. Without ADD the sums begin here.
template <bool ADD = true>
__device__ __forceinline__ void wgmma_s8_n64(int* d, const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {" D0_31 "},{%32,%33,%34,%35},%36,%37;"
               : OUT16(INT_, d, 0), OUT16(INT_, d, 16)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD));
}
template <bool ADD = true>
__device__ __forceinline__ void wgmma_s8_n64(int* d, uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {" D0_31 "},%32,%33,%34;"
               : OUT16(INT_, d, 0), OUT16(INT_, d, 16)
               : "l"(a), "l"(b), "n"(ADD));
}
// int32 [64 x 16] += int8 A * int8 B, 32 deep.
template <bool ADD = true>
__device__ __forceinline__ void wgmma_s8_n16(int* d, const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {" D0_7 "},{%8,%9,%10,%11},%12,%13;"
               : OUT4(INT_, d, 0), OUT4(INT_, d, 4)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD));
}
template <bool ADD = true>
__device__ __forceinline__ void wgmma_s8_n16(int* d, uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {" D0_7 "},%8,%9,%10;"
               : OUT4(INT_, d, 0), OUT4(INT_, d, 4)
               : "l"(a), "l"(b), "n"(ADD));
}
// float [64 x N] += half A * half B, 16 deep. TRANSPOSED: a core matrix of B is 8 values along K, each with 16 bytes
// along N. Without ADD the sums begin here.
template <int N, bool TRANSPOSED = false, bool ADD = true>
__device__ __forceinline__ void wgmma_f16(float* d, const uint32_t* a, uint64_t b) {
  if constexpr (N == 64) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D0_31 "},{%32,%33,%34,%35},%36,%37,1,1,%38;"
                 : OUT16(FLOAT_, d, 0), OUT16(FLOAT_, d, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD), "n"(TRANSPOSED));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" D0_31 "," D32_63
                 "},{%64,%65,%66,%67},%68,%69,1,1,%70;"
                 : OUT16(FLOAT_, d, 0), OUT16(FLOAT_, d, 16), OUT16(FLOAT_, d, 32), OUT16(FLOAT_, d, 48)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD), "n"(TRANSPOSED));
    // 256 accumulators at once would need more registers than a thread has before it gets more.
    if constexpr (N == 256) wgmma_f16<128, TRANSPOSED, ADD>(d + 64, a, b + (TRANSPOSED ? 1024 : 128));
  }
}
template <bool ADD>
__device__ __forceinline__ void wgmma_f16_n64(float* d, uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D0_31 "},%32,%33,%34,1,1,0,0;"
               : OUT16(FLOAT_, d, 0), OUT16(FLOAT_, d, 16)
               : "l"(a), "l"(b), "n"(ADD));
}
#endif
