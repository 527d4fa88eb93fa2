// Memory that a thread keeps between jobs; it grows when one needs more.
#pragma once
#include <cstdint>
#include <memory>

namespace minima {

class Buffer {
 public:
  // At least so many bytes, aligned to a cache line. Contents are lost.
  uint8_t* reserve(int64_t bytes) {
    if (bytes > capacity_) {
      memory_.reset(new uint8_t[bytes + 63]);
      capacity_ = bytes;
    }
    return memory_.get() + (-reinterpret_cast<uintptr_t>(memory_.get()) & 63);
  }

 private:
  std::unique_ptr<uint8_t[]> memory_;
  int64_t capacity_ = 0;
};

}  // namespace minima
