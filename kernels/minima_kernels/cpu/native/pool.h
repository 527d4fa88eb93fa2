// A small thread pool: workers sleep between jobs, the caller takes part in every job.
#pragma once
#include <cstdint>

namespace minima {

// Calls task(context, index, slot) for every index in 0 .. count - 1, on at most `threads` threads.
// `slot` (below `threads`) is the number of the thread within the job. Returns when all are done.
// Concurrent calls from several threads take turns.
using Task = void (*)(void* context, int64_t index, int slot);
void parallel_for(int64_t count, int threads, Task task, void* context);

template <typename Function>
void parallel_for(int64_t count, int threads, const Function& function) {
  parallel_for(
      count, threads,
      [](void* context, int64_t index, int slot) {
        (*static_cast<const Function*>(context))(index, slot);
      },
      const_cast<Function*>(&function));
}

constexpr int kMaxThreads = 256;

}  // namespace minima
