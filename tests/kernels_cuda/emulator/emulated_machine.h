// What machine.cuh has for a GPU, and the names that CUDA C++ itself gives.
#pragma once
#include "emulator.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <vector_functions.h>

#undef __shared__
#undef __launch_bounds__
#undef __forceinline__
#define __shared__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)
#define DYNAMIC_SHARED(BYTES, NAME) uint8_t* const NAME = emulator::dynamic_shared

using std::max;
using std::min;

template <typename T, typename F>
inline T bits_as(F x) {
  static_assert(sizeof(T) == sizeof(F), "bits of one size");
  T y;
  memcpy(&y, &x, sizeof y);
  return y;
}

inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline int __float2int_rn(float x) { return (int)std::nearbyintf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmul_rn(float x, float y) { volatile float z = x * y; return z; }
inline float __fadd_rn(float x, float y) { volatile float z = x + y; return z; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
template <typename T>
inline T __ldg(const T* p) { return *p; }

inline void __syncwarp() { emulator::exchange(0, "__syncwarp"); }
inline void __syncthreads() {
  int live = 0;
  for (unsigned i = 0; i < emulator::block_size.x * emulator::block_size.y; i++) live += !emulator::fibers[i].done;
  emulator::sync_named(0, live);
}
template <typename T>
inline T __shfl_sync(unsigned, T value, int lane) {
  return bits_as<T>(emulator::exchange(bits_as<uint32_t>(value), "__shfl_sync")[lane & 31]);
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return bits_as<T>(emulator::exchange(bits_as<uint32_t>(value), "__shfl_xor_sync")[emulator::current->lane ^ mask]);
}
template <typename T>
inline T __shfl_down_sync(unsigned, T value, int by) {
  const int lane = emulator::current->lane + by;
  return bits_as<T>(emulator::exchange(bits_as<uint32_t>(value), "__shfl_down_sync")[lane > 31 ? lane - by : lane]);
}
inline bool __any_sync(unsigned, bool x) {
  const uint32_t* all = emulator::exchange(x, "__any_sync");
  return std::any_of(all, all + 32, [](uint32_t v) { return v != 0; });
}
inline bool __all_sync(unsigned, bool x) {
  const uint32_t* all = emulator::exchange(x, "__all_sync");
  return std::all_of(all, all + 32, [](uint32_t v) { return v != 0; });
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const uint32_t* all = emulator::exchange(x, "__ballot_sync");
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= (unsigned)(all[i] != 0) << i;
  return bits;
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t x) {
  const uint32_t* all = emulator::exchange(x, "__reduce_max_sync");
  return *std::max_element(all, all + 32);
}

inline void depend_wait() {}
inline void depend_go() {}
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t s) {
  const uint64_t both = (uint64_t)b << 32 | a;
  uint32_t d = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t pick = s >> 4 * i & 15;
    uint32_t byte = (uint32_t)(both >> 8 * (pick & 7)) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    d |= byte << 8 * i;
  }
  return d;
}
inline int max3(int a, int b, int c) { return std::max(a, std::max(b, c)); }
inline float exp2_fast(float x) { return x < -126.f ? 0.f : exp2f(x); }
inline float log2_fast(float x) { return log2f(x); }
inline uint32_t pack_half2(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&h);
}
inline uint32_t pack_bf16(float low, float high) { return bits_as<uint32_t>(__floats2bfloat162_rn(low, high)); }
inline uint32_t halves_of_e4m3(uint32_t pair) {
  return bits_as<uint32_t>(__half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)pair, __NV_E4M3)));
}
inline uint32_t shared_address(const void* p) { return emulator::address_of(p); }
template <typename T>
inline T load_shared(uint32_t a) {
  if (a % sizeof(T)) emulator::fail("misaligned load");
  T v;
  memcpy(&v, emulator::at_address(a), sizeof v);
  return v;
}
inline uint4 load_shared16(uint32_t a) { return load_shared<uint4>(a); }
inline uint2 load_shared8(uint32_t a) { return load_shared<uint2>(a); }
inline float load_shared_half(uint32_t a) { return __half2float(bits_as<__half>(load_shared<uint16_t>(a))); }
inline float4 load_floats(uint32_t a) { return load_shared<float4>(a); }
inline uint4 load_here(const uint4* p) { return *p; }
inline int load_int(const int* p) { return *p; }
inline void store4(uint32_t a, uint32_t v) { memcpy(emulator::at_address(a), &v, 4); }

inline void store16(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  if (a % 16) emulator::fail("misaligned store");
  const uint32_t words[4] = {x, y, z, w};
  memcpy(emulator::at_address(a), words, 16);
}

inline void barrier_init(uint32_t a, uint32_t n) {
  *reinterpret_cast<emulator::Barrier*>(emulator::at_address(a)) = {0, (uint8_t)n, (uint8_t)n, 0};
}
inline void barrier_wait(uint32_t a, uint32_t phase) {
  emulator::wait_while(&reinterpret_cast<emulator::Barrier*>(emulator::at_address(a))->phase, phase, "a barrier");
}
inline void arrive(uint32_t a, uint32_t count) { emulator::barrier_arrive(a, count); }
inline void publish_barriers() {}
inline void publish_shared() {}
inline void barrier_expect(uint32_t a, uint32_t bytes) {
  if (bytes % 16) emulator::fail("bulk copies move multiples of 16 bytes");
  reinterpret_cast<emulator::Barrier*>(emulator::at_address(a))->sixteens += (int16_t)(bytes / 16);
  emulator::barrier_arrive(a, 1);
}
inline void bulk_copy(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16) emulator::fail("misaligned bulk copy");
  memcpy(emulator::at_address(target), source, bytes);
  auto& state = *reinterpret_cast<emulator::Barrier*>(emulator::at_address(barrier));
  state.sixteens -= (int16_t)(bytes / 16);
  emulator::barrier_step(state);
}

// Rows g and g + 8 of A, columns 2 j and 2 j + 1 of B; `multiply(a, b)` of two words of operands.
template <typename T, typename Multiply>
inline void multiply_fragments(T* c, const uint32_t* a, const uint32_t* b, Multiply multiply) {
  uint32_t rows[4][32], columns[2][32];
  for (int i = 0; i < 4; i++) memcpy(rows[i], emulator::exchange(a[i], "mma"), sizeof rows[i]);
  for (int i = 0; i < 2; i++) memcpy(columns[i], emulator::exchange(b[i], "mma"), sizeof columns[i]);
  const int g = emulator::current->lane >> 2, j = emulator::current->lane & 3;
  for (int r = 0; r < 2; r++)
    for (int n = 0; n < 2; n++)
      for (int half = 0; half < 2; half++)
        for (int k = 0; k < 4; k++)
          c[2 * r + n] += multiply(rows[2 * half + r][4 * g + k], columns[half][4 * (2 * j + n) + k]);
}
template <typename B>
inline int multiply_bytes(uint32_t a, uint32_t b) {
  int sum = 0;
  for (int i = 0; i < 4; i++) sum += (int8_t)(a >> 8 * i) * (int)(B)(b >> 8 * i);
  return sum;
}
inline void mma_ss(int* c, const uint32_t* a, const uint32_t* b) { multiply_fragments(c, a, b, multiply_bytes<int8_t>); }
inline void mma_su(int* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  const uint32_t b[2] = {b0, b1};
  multiply_fragments(c, a, b, multiply_bytes<uint8_t>);
}
inline void mma_f16(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  multiply_fragments(c, a, b, [](uint32_t x, uint32_t y) {
    const float2 f = __half22float2(bits_as<__half2>(x)), g = __half22float2(bits_as<__half2>(y));
    return f.x * g.x + f.y * g.y;
  });
}
inline void mma_bf16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  const uint32_t b[2] = {b0, b1};
  multiply_fragments(c, a, b, [](uint32_t x, uint32_t y) {
    const float2 f = __bfloat1622float2(bits_as<__nv_bfloat162>(x)), g = __bfloat1622float2(bits_as<__nv_bfloat162>(y));
    return f.x * g.x + f.y * g.y;
  });
}
// `word(rows)`: what a lane gets of a matrix whose rows begin there.
template <typename Word>
inline void load_rows(uint32_t a, uint32_t* r, Word word) {
  if (a % 16) emulator::fail("misaligned row of a matrix");
  uint32_t rows[32];
  memcpy(rows, emulator::exchange(a, "ldmatrix"), sizeof rows);
  for (int i = 0; i < 4; i++) r[i] = word(rows + 8 * i);
  emulator::exchange(0, "ldmatrix");  // nobody stores before all have read
}
inline void load_matrices(uint32_t a, uint32_t* r) {
  const int g = emulator::current->lane >> 2, j = emulator::current->lane & 3;
  load_rows(a, r, [&](const uint32_t* rows) { return load_shared<uint32_t>(rows[g] + 4 * j); });
}
inline void load_matrices_transposed(uint32_t a, uint32_t* r) {
  const int g = emulator::current->lane >> 2, j = emulator::current->lane & 3;
  load_rows(a, r, [&](const uint32_t* rows) {
    return load_shared<uint16_t>(rows[2 * j] + 2 * g) | (uint32_t)load_shared<uint16_t>(rows[2 * j + 1] + 2 * g) << 16;
  });
}
inline void store_matrices(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  const uint32_t* all = emulator::exchange(a, "store_matrices");
  const int g = emulator::current->lane >> 2, j = emulator::current->lane & 3;
  uint32_t rows[4];
  for (int i = 0; i < 4; i++) rows[i] = all[8 * i + g] + 4 * j;
  const uint32_t values[4] = {x, y, z, w};
  for (int i = 0; i < 4; i++) store4(rows[i], values[i]);
}
inline uint32_t transpose8x8(uint32_t a) {
  const uint32_t* all = emulator::exchange(a, "transpose8x8");
  const int g = emulator::current->lane >> 2, j = emulator::current->lane & 3;
  auto element = [&](int row, int column) { return all[4 * row + column / 2] >> 16 * (column & 1) & 0xFFFF; };
  return element(2 * j, g) | element(2 * j + 1, g) << 16;
}
template <int COUNT>
inline void give_registers() {}
template <int COUNT>
inline void take_registers() {}
template <int THREADS>
inline void sync_threads(int number) { emulator::sync_named(number, THREADS); }

inline uint32_t load_word(const uint8_t* p) {
  uint32_t v;
  memcpy(&v, p, 4);
  return v;
}
template <int COUNT>
inline void load_words(const uint8_t* p, uint32_t* x) {
  if (reinterpret_cast<uintptr_t>(p) % (4 * COUNT)) emulator::fail("misaligned load");
  memcpy(x, p, 4 * COUNT);
}
template <int BYTES>
inline void prefetch(const uint8_t* p) {
  static_assert(BYTES % 16 == 0, "a multiple of 16 bytes");
  if (reinterpret_cast<uintptr_t>(p) % 16) emulator::fail("misaligned prefetch");
  volatile uint8_t read = p[0] ^ p[BYTES - 1];  // both ends must be memory
  (void)read;
}
template <int BYTES>
inline void copy_async(uint32_t target, const void* source) {
  if (target % BYTES || reinterpret_cast<uintptr_t>(source) % BYTES) emulator::fail("misaligned copy");
  if (emulator::by_chance()) memcpy(emulator::at_address(target), source, BYTES);
  else emulator::current->copies.push_back({emulator::at_address(target), source, BYTES, emulator::current->copy_groups});
}
inline void copy_async_commit() { emulator::current->copy_groups++; }
template <int PENDING>
inline void copy_async_wait_group() {
  auto& copies = emulator::current->copies;  // oldest first
  while (!copies.empty() && copies.front().group < emulator::current->copy_groups - PENDING) {
    memcpy(copies.front().target, copies.front().source, copies.front().size);
    copies.erase(copies.begin());
  }
}
inline void copy_async_wait() {
  for (const emulator::Copy& copy : emulator::current->copies) memcpy(copy.target, copy.source, copy.size);
  emulator::current->copies.clear();
}
