// Whole pages from one format to another: seal, retier, promote. Macros: those of retier.cuh.
#include "retier.cuh"

// `sources`, `targets`: page addresses in granules. `from_first`, `from_step`: bytes into a page of the first
// layer's share and from one layer to the next. Then the parts of a layer's share in row order, in bytes; codes
// of K come first. Grid: pages x layers x KV heads, heads fastest.
extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM == 256 ? 2 : 3)
    retier(uint8_t* arena, const long long* sources, const long long* targets, int from_first, int from_step,
           int to_first, int to_step, int num_layers, int num_heads, int from_v, int from_k_scales, int from_v_scales,
           int to_v, int to_k_scales, int to_v_scales) {
  DYNAMIC_SHARED(128, memory);
  __shared__ float sums[TO == TQ && TO_CENTRED ? WARPS : 1][HEAD_DIM];
  const int head = blockIdx.x % num_heads, layer = blockIdx.x / num_heads % num_layers;
  const int page = blockIdx.x / num_heads / num_layers, lane = threadIdx.x & 31;
  uint8_t* source = arena + sources[page] * GRANULE + from_first + (size_t)layer * from_step;
  uint8_t* target = arena + targets[page] * GRANULE + to_first + (size_t)layer * to_step;
  const Place at{(int)threadIdx.x >> 5, lane, lane / LANES};
  auto* words = reinterpret_cast<uint32_t*>(memory + LARGEST);
  auto* share = reinterpret_cast<uint4*>(memory);
  if constexpr (FROM == TQ) load_share(source + (size_t)head * From::BYTES, share);
  // Made in shared memory, unless that holds what it is made from.
  uint8_t* made = FROM == TQ && TO == TQ ? target + (size_t)head * To::BYTES : memory;
  const int from_codes = head * PAGE * HEAD_DIM * FROM_SIZE, to_codes = head * PAGE * HEAD_DIM * TO_SIZE;
  const int scales = head * PAGE * 2;
  if (FROM != TQ && threadIdx.x == 0) prefetch<PAGE * HEAD_DIM * FROM_SIZE>(source + from_v + from_codes);
  convert<false>({source + from_codes, source + from_k_scales + scales}, {target + to_codes, target + to_k_scales + scales},
                 memory, made, words, sums, at);
  convert<true>({source + from_v + from_codes, source + from_v_scales + scales},
                {target + to_v + to_codes, target + to_v_scales + scales}, memory, made, words, sums, at);
  if constexpr (TO == TQ && FROM != TQ) {
    auto* to = reinterpret_cast<uint4*>(target + (size_t)head * To::BYTES);
    for (int i = threadIdx.x; i < To::BYTES / 16; i += THREADS) to[i] = share[i];
  }
}
extern "C" __device__ const int shared_bytes = SHARED;
