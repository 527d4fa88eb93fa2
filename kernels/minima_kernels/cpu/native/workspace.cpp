#include "workspace.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

namespace minima {
namespace {

size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

void* allocate(size_t bytes) {
  void* memory = std::aligned_alloc(64, rounded(bytes));
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

Workspace::~Workspace() {
  std::free(memory_);
  std::free(scratch);
}

void Workspace::reserve(const Level& level, int64_t rows, int dim) {
  if (level.scratch_bytes > scratch_bytes_) {
    std::free(scratch);
    scratch = allocate(level.scratch_bytes);
    scratch_bytes_ = level.scratch_bytes;
  }
  const size_t wide = rounded(rows * dim * sizeof(float));
  const size_t half = rounded(rows * dim * sizeof(int16_t));
  const size_t narrow = rounded(rows * sizeof(float));
  const int64_t bytes = static_cast<int64_t>(2 * wide + half + 4 * narrow);
  if (bytes > capacity_) {
    std::free(memory_);
    memory_ = allocate(bytes);
    capacity_ = bytes;
  }
  char* at = static_cast<char*>(memory_);
  const auto take = [&at](size_t size) {
    void* part = at;
    at += size;
    return part;
  };
  q = static_cast<float*>(take(wide));
  out = static_cast<float*>(take(wide));
  q16 = static_cast<int16_t*>(take(half));
  max = static_cast<float*>(take(narrow));
  sum = static_cast<float*>(take(narrow));
  q_step = static_cast<float*>(take(narrow));
  q_start = static_cast<int32_t*>(take(narrow));
}

void Workspace::start(const Level& level, int64_t rows, int dim) {
  for (int64_t row = 0; row < rows; ++row) {
    level.quantise(q + row * dim, dim, q16 + row * dim, q_step + row, q_start + row);
    max[row] = -INFINITY;
    sum[row] = 0;
  }
  std::memset(out, 0, rows * dim * sizeof(float));
}

Workspace& workspace() {
  static thread_local Workspace instance;
  return instance;
}

}  // namespace minima
