#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace minima {
namespace {

// Waking a sleeping thread takes longer than most jobs of a decode step: 50 to 150 us where the core
// itself was halted. So a thread looks out for a moment before it sleeps. Where that was in vain, as
// on cores that others need, it looks out half as long the next time, down to nothing noticeable.
class Lookout {
 public:
  // False if `ready` did not become true in time.
  template <class Ready>
  bool wait(Ready ready) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(budget_);
    do {
      for (int turn = 0; turn < 32; ++turn) {
        if (ready()) {
          budget_ = std::min<int64_t>(2 * budget_, kLongest);
          return true;
        }
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    budget_ = std::max<int64_t>(budget_ / 2, kShortest);
    return false;
  }

 private:
  static constexpr int64_t kLongest = 100'000, kShortest = 1'000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  int64_t budget_ = kLongest;
};

// One word says how many workers a job still wants (upper half) and how many are at it (lower half),
// so that workers which are awake join and leave without a lock. The lock is for those that sleep:
// each side first says that it sleeps and then looks at the word, the other changes the word first
// and then looks for sleepers.
class Pool {
 public:
  void run(int64_t count, int threads, Task task, void* context) {
    std::lock_guard<std::mutex> turn(turn_);
    grow(threads - 1);
    task_ = task;
    context_ = context;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    last_slot_ = threads - 1;
    state_ = last_slot_ * kWanted;
    if (sleeping_ > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      for (int i = std::min<int>(sleeping_, threads - 1); i > 0; --i) wake_.notify_one();
    }
    work(0);
    state_ &= kActive;  // a worker that has not woken up yet is no longer needed
    const auto done = [this] { return state_ == 0; };
    if (lookout_.wait(done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    caller_sleeps_ = true;
    done_.wait(lock, done);
    caller_sleeps_ = false;
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

 private:
  static constexpr uint64_t kWanted = uint64_t{1} << 32, kActive = kWanted - 1;

  void grow(int workers) {
    while (static_cast<int>(workers_.size()) < workers) workers_.emplace_back([this] { loop(); });
  }

  void work(int slot) {
    // Nothing of a job changes while a thread is at it.
    const Task task = task_;
    void* const context = context_;
    const int64_t count = count_;
    for (;;) {
      const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
      if (index >= count) return;
      task(context, index, slot);
    }
  }

  // The number of the worker within the job, or 0 if no job wants it.
  int join() {
    uint64_t state = state_;
    while (state >= kWanted)
      if (state_.compare_exchange_weak(state, state - kWanted + 1))
        return last_slot_ + 1 - static_cast<int>(state / kWanted);
    return 0;
  }

  void loop() {
    Lookout lookout;
    for (;;) {
      int slot = 0;
      if (!lookout.wait([&] { return stopping_ || (slot = join()); })) {
        std::unique_lock<std::mutex> lock(mutex_);
        ++sleeping_;
        wake_.wait(lock, [&] { return stopping_ || (slot = join()); });
        --sleeping_;
      }
      if (!slot) return;
      work(slot);
      if (--state_ == 0 && caller_sleeps_) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        done_.notify_one();
      }
    }
  }

  std::mutex turn_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  int last_slot_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<uint64_t> state_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> caller_sleeps_{false}, stopping_{false};
  Lookout lookout_;
};

alignas(Pool) unsigned char storage[sizeof(Pool)];
Pool* pool = nullptr;
std::once_flag registered;

// The workers do not survive a fork, and the locks may be held by one of them: the child starts
// over and leaves the parent's object alone.
void after_fork() { pool = new (storage) Pool; }

// Static destruction must not find workers asleep on a condition variable that is going away.
struct Stopper {
  ~Stopper() {
    if (pool) pool->stop();
  }
} stopper;

Pool& instance() {
  std::call_once(registered, [] {
    pool = new (storage) Pool;
    pthread_atfork(nullptr, nullptr, after_fork);
  });
  return *pool;
}

}  // namespace

void parallel_for(int64_t count, int threads, Task task, void* context) {
  if (threads > kMaxThreads) threads = kMaxThreads;
  if (threads > count) threads = static_cast<int>(count);
  if (threads <= 1) {
    for (int64_t index = 0; index < count; ++index) task(context, index, 0);
    return;
  }
  instance().run(count, threads, task, context);
}

}  // namespace minima
