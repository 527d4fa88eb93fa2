// Buffers of a thread: grow when a job needs more, kept between jobs.
#pragma once
#include <cstdint>

#include "levels.h"

namespace minima {

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();

  // Room for `rows` rows of `dim` channels. Contents are lost.
  void reserve(const Level& level, int64_t rows, int dim);
  // Quantises `q` and resets the running softmax of all rows.
  void start(const Level& level, int64_t rows, int dim);

  void* scratch = nullptr;
  float* q = nullptr;
  float* out = nullptr;
  float* max = nullptr;
  float* sum = nullptr;
  float* q_step = nullptr;
  int32_t* q_start = nullptr;
  int16_t* q16 = nullptr;

  AttendJob job(const MinimaGeometry& geometry, int head, int64_t rows) const {
    return {&geometry, head, static_cast<int>(rows), q, q16, q_step, q_start, out, max, sum,
            nullptr, -1, -1};
  }

 private:
  void* memory_ = nullptr;
  int64_t capacity_ = 0;
  size_t scratch_bytes_ = 0;
};

// The workspace of the calling thread.
Workspace& workspace();

}  // namespace minima
