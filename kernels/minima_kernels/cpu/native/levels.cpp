#include "levels.h"

#include <atomic>
#include <cstring>

namespace minima {
namespace {

#if defined(__x86_64__)
const Level* const levels[] = {&avx512_level, &avx2_level, &portable_level};
#else
const Level* const levels[] = {&portable_level};
#endif

std::atomic<const Level*> chosen{nullptr};

}  // namespace

bool machine_has(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  if (!std::strcmp(name, "avx2")) return avx2;
  if (!std::strcmp(name, "avx512"))
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
#endif
  return !std::strcmp(name, "portable");
}

const Level& current_level() {
  const Level* level = chosen.load(std::memory_order_relaxed);
  if (level) return *level;
  for (const Level* candidate : levels) {
    if (machine_has(candidate->name)) {
      chosen.store(candidate, std::memory_order_relaxed);
      return *candidate;
    }
  }
  return portable_level;
}

bool force_level(const char* name) {
  if (!*name) return chosen.store(nullptr, std::memory_order_relaxed), true;
  for (const Level* level : levels) {
    if (!std::strcmp(level->name, name) && machine_has(name))
      return chosen.store(level, std::memory_order_relaxed), true;
  }
  return false;
}

}  // namespace minima
