// Runs kernels on a CPU, a thread block at a time: every thread is a fiber, warps take turns in an order that a
// seed decides, and what the machine does behind a program's back (products of warpgroups, copies) happens as
// late or as early as the program allows. Threads that wait for each other for ever are reported, and so are
// lanes of a warp that meet in different places and sums touched while a product adds to them.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <vector_types.h>

namespace emulator {

constexpr int WARP = 32, NAMED = 16;
constexpr size_t STACK = 96 << 10, SHARED_SIZE = 0x40000;

struct Product {
  int rank;  // of a committed group; 0 while it is open
  const void* sums;
  size_t size;
  std::vector<uint8_t> before;
  std::function<void()> run;
};
struct Copy {
  void* target;
  const void* source;
  size_t size;
  int group;
};

struct Warp {
  uint32_t generation = 0;
  int arrived = 0, lanes = 0;
  const char* where = "";
  uint32_t in[WARP] = {}, out[WARP] = {};
};

struct Fiber {
  ucontext_t context;
  std::vector<uint8_t> stack;
  uint3 thread;
  int lane = 0;
  Warp* warp = nullptr;
  bool done = false;
  const uint32_t* word = nullptr;  // runs again when this is no longer `unwanted`
  uint32_t unwanted = 0;
  const char* where = "";
  int groups = 0, copy_groups = 0;  // committed
  std::vector<Product> products;
  std::vector<Copy> copies;
};

struct Named {
  uint32_t generation;
  int arrived;
};

// State of a barrier in shared memory.
struct Barrier {
  uint32_t phase;
  uint8_t total, pending;
  int16_t sixteens;  // bytes still expected, in units of 16
};
static_assert(sizeof(Barrier) == 8, "a barrier is a word of 64 bits");

alignas(SHARED_SIZE) inline uint8_t dynamic_shared[SHARED_SIZE];
inline Fiber* current;
inline uint3 block_index;
inline dim3 block_size, grid_size;
inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Named named[NAMED];
inline std::mt19937 chance;
inline std::string error;
inline std::function<void()> body;

[[noreturn]] inline void leave() {
  swapcontext(&current->context, &scheduler);
  std::abort();
}
[[noreturn]] inline void fail(const std::string& text) {
  char place[96];
  snprintf(place, sizeof place, "block %u, thread %u,%u: ", block_index.x, current->thread.x, current->thread.y);
  if (error.empty()) error = place + text;
  leave();
}

inline void wait_while(const uint32_t* word, uint32_t unwanted, const char* where) {
  current->word = word, current->unwanted = unwanted, current->where = where;
  while (*word == unwanted) swapcontext(&current->context, &scheduler);
  current->word = nullptr;
}

// What every lane of the warp has put in, once all have.
inline const uint32_t* exchange(uint32_t value, const char* where) {
  Warp& warp = *current->warp;
  if (warp.arrived == 0) warp.where = where;
  else if (strcmp(warp.where, where)) fail(std::string("lanes of a warp part: ") + warp.where + " and " + where);
  warp.in[current->lane] = value;
  if (++warp.arrived == warp.lanes) {
    memcpy(warp.out, warp.in, sizeof warp.in);
    warp.arrived = 0, warp.generation++;
  } else {
    wait_while(&warp.generation, warp.generation, where);
  }
  return warp.out;
}

inline void sync_named(int number, int threads) {
  Named& barrier = named[number];
  if (++barrier.arrived == threads) barrier.arrived = 0, barrier.generation++;
  else wait_while(&barrier.generation, barrier.generation, "a named barrier");
}

// Shared memory in 32 bits: dynamic shared memory begins at 0, the rest lies at some distance of it.
inline uint32_t address_of(const void* p) { return (uint32_t)(static_cast<const uint8_t*>(p) - dynamic_shared); }
inline uint8_t* at_address(uint32_t a) { return dynamic_shared + (int32_t)a; }

inline void barrier_step(Barrier& barrier) {
  if (barrier.pending == 0 && barrier.sixteens == 0) barrier.phase ^= 1, barrier.pending = barrier.total;
}
inline void barrier_arrive(uint32_t address, uint32_t count) {
  Barrier& barrier = *reinterpret_cast<Barrier*>(at_address(address));
  if (barrier.pending < count) fail("more arrivals at a barrier than it counts");
  barrier.pending -= count;
  barrier_step(barrier);
}

// Some things are done at once, others as late as possible.
inline bool by_chance() { return chance() & 1; }

inline void finish_products(Fiber& fiber, int pending) {
  for (size_t i = 0; i < fiber.products.size(); i++) {
    Product& product = fiber.products[i];
    if (!product.rank || product.rank > fiber.groups - pending) continue;
    if (!product.before.empty() && memcmp(product.before.data(), product.sums, product.size))
      fail("sums changed while a product adds to them");
    const void* sums = product.sums;
    product.run();
    for (size_t n = i + 1; n < fiber.products.size(); n++)  // those behind it add to what it leaves
      if (fiber.products[n].sums == sums) fiber.products[n].before.clear();
    product.run = nullptr;
  }
  auto& list = fiber.products;
  list.erase(std::remove_if(list.begin(), list.end(), [](const Product& p) { return !p.run; }), list.end());
}

inline void begin() {
  body();
  if (!current->products.empty()) fail("a product runs at the end of the thread");
  current->done = true;
  leave();
}

// Runs one block; false when it failed.
inline bool run_block() {
  const int threads = block_size.x * block_size.y, num_warps = (threads + WARP - 1) / WARP;
  memset(dynamic_shared, 0xFF, SHARED_SIZE);
  memset(named, 0, sizeof named);
  fibers.resize(std::max<size_t>(fibers.size(), threads));
  warps.assign(num_warps, Warp());
  for (int i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.stack.resize(STACK);
    fiber.thread = uint3{(unsigned)i % block_size.x, (unsigned)i / block_size.x, 0};
    fiber.lane = i % WARP, fiber.warp = &warps[i / WARP], fiber.warp->lanes++;
    fiber.done = false, fiber.word = nullptr, fiber.groups = fiber.copy_groups = 0;
    fiber.products.clear(), fiber.copies.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, begin, 0);
  }
  std::vector<int> order(num_warps);
  for (int i = 0; i < num_warps; i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), chance);
  const unsigned steadiness = 1u << chance() % 12;  // how long some warps are kept waiting by others
  for (int left = threads; left;) {
    bool ran = false;
    for (int warp : order) {
      for (int i = warp * WARP; i < std::min(threads, (warp + 1) * WARP); i++) {
        Fiber& fiber = fibers[i];
        if (fiber.done || (fiber.word && *fiber.word == fiber.unwanted)) continue;
        ran = true, current = &fiber;
        swapcontext(&scheduler, &fiber.context);
        if (!error.empty()) return false;
        left -= fiber.done;
      }
      if (ran) break;
    }
    if (!ran) {
      error = "block " + std::to_string(block_index.x) + ": threads wait for each other:";
      for (int i = 0; i < threads; i += WARP)
        if (!fibers[i].done) error += " " + std::to_string(i) + " (" + fibers[i].where + ")";
      return false;
    }
    if (chance() % steadiness == 0) std::shuffle(order.begin(), order.end(), chance);
  }
  return true;
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::decay_t<A>*>(arguments[I])...);
}

template <typename... A>
bool launch(void (*kernel)(A...), void** arguments, dim3 grid, dim3 block, unsigned seed) {
  chance.seed(seed);
  error.clear();
  grid_size = grid, block_size = block;
  body = [=] { call(kernel, arguments, std::index_sequence_for<A...>()); };
  for (unsigned y = 0; y < grid.y; y++)
    for (unsigned x = 0; x < grid.x; x++) {
      block_index = uint3{x, y, 0};
      if (!run_block()) return false;
    }
  return true;
}

}  // namespace emulator
