// Compiled without any SIMD flag: whether a level may run is decided before its code is entered.
#include "kernels.h"

#include <atomic>
#include <cstring>

namespace fastclip::cpu {
namespace {

bool has_avx512() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

// Every processor with AVX2 has F16C, for which Clang 14 has no name here.
bool has_avx2() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

// Best first.
const Kernels* find(const char* name) {
  const Kernels* levels[] = {has_avx512() ? kernels_avx512() : nullptr,
                             has_avx2() ? kernels_avx2() : nullptr, kernels_plain()};
  for (const Kernels* level : levels)
    if (level != nullptr && (name == nullptr || std::strcmp(level->name, name) == 0)) return level;
  return nullptr;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{find(nullptr)};
  return kernels;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

bool choose_kernels(const char* name) {
  const Kernels* level = find(name);
  if (level != nullptr) chosen().store(level, std::memory_order_relaxed);
  return level != nullptr;
}

}  // namespace fastclip::cpu
