// Instructions that CUDA C++ has no names for. Tests put an emulation in their place and run the kernels on a CPU.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

#ifndef __CUDACC__
#include "emulated_machine.h"
#else
// Shared memory whose size the launch says; `BYTES` its alignment.
#define DYNAMIC_SHARED(BYTES, NAME) extern __shared__ __align__(BYTES) uint8_t NAME[]

__device__ __forceinline__ void depend_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void depend_go() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t s) {
  uint32_t d;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(s));
  return d;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
// Transposes 8x8 16-bit values held one row of a matrix per four lanes.
__device__ __forceinline__ uint32_t transpose8x8(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(d) : "r"(a));
  return d;
}
__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
// Two e4m3 values, in the lower half of `pair`, to two 16-bit floats, exactly.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t pair) {
  uint32_t d;
  asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(d) : "h"((uint16_t)pair));
  return d;
}
// Hopper has an instruction for three integers, not for three floats.
__device__ __forceinline__ int max3(int a, int b, int c) { return __vimax3_s32(a, b, c); }
__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ uint4 load_shared16(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
__device__ __forceinline__ uint2 load_shared8(uint32_t a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
__device__ __forceinline__ float load_shared_half(uint32_t a) {
  uint16_t h;
  asm volatile("ld.shared.u16 %0,[%1];" : "=h"(h) : "r"(a));
  return __half2float(__ushort_as_half(h));
}
// Four 8x8 matrices of 16-bit values; lane n gives the address of row n % 8 of matrix n / 8.
__device__ __forceinline__ void load_matrices(uint32_t a, uint32_t* r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t a, uint32_t* r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
// The same of registers to matrices.
__device__ __forceinline__ void store_matrices(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};"
               ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// Not to be hoisted out of a loop: that would cost more registers than the loads cost time.
__device__ __forceinline__ uint4 load_here(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void barrier_init(uint32_t a, uint32_t n) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(a), "r"(n));
}
__device__ __forceinline__ void barrier_wait(uint32_t a, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared.b64 p,[%0],%1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(a),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_copy(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
// int32 [16 x 8] += int8 A * int8 or uint8 B, 32 deep.
__device__ __forceinline__ void mma_ss(int* c, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_su(int* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_f16(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Loaded anew where it is needed, not kept.
__device__ __forceinline__ int load_int(const int* p) {
  int v;
  asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ void store4(uint32_t a, uint32_t v) {
  asm volatile("st.shared.u32 [%0],%1;" ::"r"(a), "r"(v) : "memory");
}
__device__ __forceinline__ void store16(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ float4 load_floats(uint32_t a) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a));
  return v;
}
__device__ __forceinline__ void arrive(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.shared.b64 _,[%0],%1;" ::"r"(barrier), "r"(count) : "memory");
}
// Words read once: they need no place in the first cache.
__device__ __forceinline__ uint32_t load_word(const uint8_t* p) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}
template <int COUNT>
__device__ __forceinline__ void load_words(const uint8_t* p, uint32_t* x) {
  if constexpr (COUNT == 4)
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(p));
  else if constexpr (COUNT == 2)
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(p));
  else
    x[0] = load_word(p);
}
// Bytes that will be loaded soon, brought to the second cache.
template <int BYTES>
__device__ __forceinline__ void prefetch(const uint8_t* p) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(p), "n"(BYTES) : "memory");
}
template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t target, const void* source) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(target), "l"(source) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0],[%1],%2;" ::"r"(target), "l"(source), "n"(BYTES) : "memory");
}
// Copies of this thread since the last call are a group; waiting leaves the latest PENDING groups on their way.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Makes what this thread stored in shared memory visible to tensor cores and bulk copies.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A warpgroup gives up registers, or takes those given up; `COUNT` is what a thread has afterwards.
template <int COUNT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// A barrier of `THREADS` threads of a block; number 0 is that of the whole block.
template <int THREADS>
__device__ __forceinline__ void sync_threads(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}
#endif
