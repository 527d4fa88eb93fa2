// One layer of pages as dense keys and values in 16 bits, for attention of many new tokens. Macros: those of
// retier.cuh; TO is 1 or 2.
#include "retier.cuh"

// `first`: bytes into a page of the layer's share; then its parts in row order. `keys`, `values`
// [KV heads][64 x pages][HEAD_DIM]. Grid: pages x KV heads, heads fastest.
extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM == 256 ? 2 : 3)
    expand(uint8_t* arena, const long long* sources, int first, int num_heads, int from_v, int from_k_scales,
           int from_v_scales, uint8_t* keys, uint8_t* values, int num_pages) {
  DYNAMIC_SHARED(128, memory);
  static_assert(TO == F16 || TO == BF16, "16 bits");
  const int head = blockIdx.x % num_heads, page = blockIdx.x / num_heads, lane = threadIdx.x & 31;
  uint8_t* source = arena + sources[page] * GRANULE + first;
  const Place at{(int)threadIdx.x >> 5, lane, lane / LANES};
  auto* words = reinterpret_cast<uint32_t*>(memory + LARGEST);
  if constexpr (FROM == TQ) load_share(source + (size_t)head * From::BYTES, reinterpret_cast<uint4*>(memory));
  const int codes = head * PAGE * HEAD_DIM * FROM_SIZE, scales = head * PAGE * 2;
  if (FROM != TQ && threadIdx.x == 0) prefetch<PAGE * HEAD_DIM * FROM_SIZE>(source + from_v + codes);
  const size_t to = ((size_t)head * num_pages + page) * PAGE * HEAD_DIM * 2;
  convert<false>({source + codes, source + from_k_scales + scales}, {keys + to, nullptr}, memory, nullptr, words, nullptr, at);
  convert<true>({source + from_v + codes, source + from_v_scales + scales}, {values + to, nullptr}, memory, nullptr, words,
                nullptr, at);
}
extern "C" __device__ const int shared_bytes = SHARED;
