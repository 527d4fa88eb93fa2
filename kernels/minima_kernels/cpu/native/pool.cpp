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
  template <class Ready>
  void wait(Ready ready) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(budget_);
    do {
      for (int turn = 0; turn < 32; ++turn) {
        if (ready()) {
          budget_ = std::min<int64_t>(2 * budget_, kLongest);
          return;
        }
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    budget_ = std::max<int64_t>(budget_ / 2, kShortest);
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

class Pool {
 public:
  void run(int64_t count, int threads, Task task, void* context) {
    std::lock_guard<std::mutex> turn(turn_);
    grow(threads - 1);
    bool sleepers;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      context_ = context;
      count_ = count;
      next_.store(0, std::memory_order_relaxed);
      wanted_ = threads - 1;
      joined_ = 0;
      generation_.fetch_add(1, std::memory_order_release);
      sleepers = sleeping_ > 0;
    }
    if (sleepers) wake_.notify_all();
    work(task, context, count, 0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      wanted_ = 0;  // a worker that has not woken up yet is no longer needed
    }
    lookout_.wait([this] { return active_.load(std::memory_order_acquire) == 0; });
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return active_ == 0; });
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

 private:
  void grow(int workers) {
    while (static_cast<int>(workers_.size()) < workers) workers_.emplace_back([this] { loop(); });
  }

  void work(Task task, void* context, int64_t count, int slot) {
    for (;;) {
      const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
      if (index >= count) return;
      task(context, index, slot);
    }
  }

  void loop() {
    uint64_t seen = 0;
    Lookout lookout;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (generation_ == seen) {
        lock.unlock();
        lookout.wait([&] { return generation_.load(std::memory_order_acquire) != seen; });
        lock.lock();
      }
      ++sleeping_;
      wake_.wait(lock, [&] { return stopping_ || (generation_ != seen && wanted_ > 0); });
      --sleeping_;
      if (stopping_) return;
      seen = generation_;
      --wanted_;
      ++active_;
      const int slot = ++joined_;
      const Task task = task_;
      void* context = context_;
      const int64_t count = count_;
      lock.unlock();
      work(task, context, count, slot);
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  int wanted_ = 0, joined_ = 0, sleeping_ = 0;
  std::atomic<int> active_{0};
  std::atomic<uint64_t> generation_{0};
  Lookout lookout_;
  bool stopping_ = false;
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
