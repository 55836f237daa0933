// Compiles and runs CUDA source on the host, for tests without a GPU: the dialect of csrc/cuda.
//
//   g++ -std=c++17 -x c++ -include tests/cuda_on_cpu.h -DFASTCLIP_CUDA_ON_CPU kernel.cu -pthread
//
// A block is a host thread, a CUDA thread a fiber in it, __shared__ a thread-local variable; the
// blocks of a cooperative launch are all alive at once. Device memory is host memory, and a launch
// returns when its kernel has finished. What CUDA leaves undefined and hardware may forgive stops
// the program with a message: threads of a block at different barriers, one that returned while
// others wait, a shuffle from a lane that does not exist, a misaligned access.
// Loads and stores of global memory are counted in bytes if they go through __ldg, __stcg and the
// like; atomics are not. Controls and counters: `cuda_on_cpu::runtime`, or by name from C.
// Left out: a second dimension, dynamic shared memory, operations on part of a warp.
#pragma once

#include <math.h>

#include <type_traits>

#include "cuda_on_cpu_blocks.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__  // not the attribute: libstdc++ writes __attribute__((__noinline__))
#define __align__(n) __attribute__((aligned(n)))

// AddressSanitizer does not watch thread-local variables, so each has poisoned bytes beside it:
// behind it with GCC from -O1 on, which lays them out in reverse; before it with -O0 and Clang,
// where an overrun of the last one of a function is seen only if it indexes the array itself.
#ifdef CUDA_ON_CPU_ASAN
struct CudaOnCpuGuard {
  char bytes[64];
};
#define CUDA_ON_CPU_SHARED(guard)           \
  static thread_local CudaOnCpuGuard guard; \
  __asan_poison_memory_region(&guard, 64);  \
  static thread_local
#define CUDA_ON_CPU_NAME(n) cuda_on_cpu_guard_##n
#define CUDA_ON_CPU_NUMBERED(n) CUDA_ON_CPU_SHARED(CUDA_ON_CPU_NAME(n))
#define __shared__ CUDA_ON_CPU_NUMBERED(__COUNTER__)
#else
#define __shared__ static thread_local
#endif

constexpr int warpSize = 32;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define CUDA_ON_CPU_VECTORS(T, name)                         \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };         \
  struct alignas(16) name##4 { T x, y, z, w; };              \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_ON_CPU_VECTORS(int, int)
CUDA_ON_CPU_VECTORS(unsigned, uint)
CUDA_ON_CPU_VECTORS(float, float)
struct alignas(16) double2 {
  double x, y;
};
inline double2 make_double2(double x, double y) { return {x, y}; }

namespace cuda_on_cpu {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
void check_address(const void* p, const char* function) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16, "not one access");
  if (uintptr_t(p) % sizeof(T) != 0)
    fail("block %u, thread %u: address %p is not a multiple of %zu in %s", blockIdx.x, threadIdx.x,
         p, sizeof(T), function);
}

template <class T>
T load(const T* p) {
  check_address<T>(p, __PRETTY_FUNCTION__);
  bytes_read += sizeof(T);
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
void store(T* p, T value) {
  check_address<T>(p, __PRETTY_FUNCTION__);
  bytes_written += sizeof(T);
  std::memcpy(p, &value, sizeof value);
}

// What lane `source` of the warp gives.
template <class T>
T shuffle(unsigned mask, T value, unsigned source, const char* what, Site site) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "CUDA would convert it");
  const unsigned lanes = Block::current->lanes(threadIdx.x / 32);
  if (source >= lanes)
    fail("%s (%s:%d) reads lane %u of a warp of %u", what, site.file, site.line, source, lanes);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  std::memcpy(&value, &Block::current->exchange(mask, word, what, site)[source], sizeof value);
  return value;
}

inline unsigned ballot(unsigned mask, bool vote, const char* what, Site site) {
  const uint64_t* votes = Block::current->exchange(mask, vote, what, site);
  unsigned bits = 0;
  for (unsigned i = 0; i < Block::current->lanes(threadIdx.x / 32); ++i)
    bits |= unsigned(votes[i]) << i;
  return bits;
}

}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_SITE cuda_on_cpu::Site site = cuda_on_cpu::Site::here()

inline void __syncthreads(CUDA_ON_CPU_SITE) {
  cuda_on_cpu::Block::current->wait_and_vote(false, "__syncthreads", site);
}
inline int __syncthreads_or(int vote, CUDA_ON_CPU_SITE) {
  return cuda_on_cpu::Block::current->wait_and_vote(vote != 0, "__syncthreads_or", site);
}
inline void __syncwarp(unsigned mask = 0xffffffff, CUDA_ON_CPU_SITE) {
  cuda_on_cpu::Block::current->exchange(mask, 0, "__syncwarp", site);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, CUDA_ON_CPU_SITE) {
  return cuda_on_cpu::shuffle(mask, value, unsigned(lane) % 32, "__shfl_sync", site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, CUDA_ON_CPU_SITE) {
  const unsigned lane = threadIdx.x % 32, source = lane + delta < 32 ? lane + delta : lane;
  return cuda_on_cpu::shuffle(mask, value, source, "__shfl_down_sync", site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, CUDA_ON_CPU_SITE) {
  const unsigned source = (threadIdx.x ^ unsigned(lanes)) % 32;
  return cuda_on_cpu::shuffle(mask, value, source, "__shfl_xor_sync", site);
}
inline unsigned __ballot_sync(unsigned mask, int vote, CUDA_ON_CPU_SITE) {
  return cuda_on_cpu::ballot(mask, vote != 0, "__ballot_sync", site);
}
inline int __any_sync(unsigned mask, int vote, CUDA_ON_CPU_SITE) {
  return cuda_on_cpu::ballot(mask, vote != 0, "__any_sync", site) != 0;
}
inline int __all_sync(unsigned mask, int vote, CUDA_ON_CPU_SITE) {
  return cuda_on_cpu::ballot(mask, vote == 0, "__all_sync", site) == 0;
}

namespace cooperative_groups {
struct grid_group {
  void sync(CUDA_ON_CPU_SITE) const {
    cuda_on_cpu::Block::current->wait_for_grid("this_grid().sync", site);
  }
};
inline grid_group this_grid() { return {}; }
}  // namespace cooperative_groups

inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() { __threadfence(); }
inline int atomicAdd(int* p, int value) { return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST); }
inline unsigned atomicAdd(unsigned* p, unsigned value) {
  return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);
}
inline unsigned atomicExch(unsigned* p, unsigned value) {
  return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);
}
inline unsigned atomicCAS(unsigned* p, unsigned expected, unsigned value) {
  __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

#define CUDA_ON_CPU_LOAD(name)   \
  template <class T>             \
  T name(const T* p) {           \
    return cuda_on_cpu::load(p); \
  }
#define CUDA_ON_CPU_STORE(name)                  \
  template <class T>                             \
  void name(T* p, std::common_type_t<T> value) { \
    cuda_on_cpu::store(p, value);                \
  }
CUDA_ON_CPU_LOAD(__ldg)
CUDA_ON_CPU_LOAD(__ldcg)
CUDA_ON_CPU_LOAD(__ldcs)
CUDA_ON_CPU_LOAD(__ldlu)
CUDA_ON_CPU_STORE(__stcg)
CUDA_ON_CPU_STORE(__stcs)
CUDA_ON_CPU_STORE(__stwb)

inline float min(float a, float b) { return fminf(a, b); }  // the one that is no NaN
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
template <class T>
std::enable_if_t<std::is_integral_v<T>, T> min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
std::enable_if_t<std::is_integral_v<T>, T> max(T a, T b) {
  return a < b ? b : a;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(unsigned(bits)); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu::bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return cuda_on_cpu::bits_as<unsigned>(x); }
inline double __longlong_as_double(long long x) { return cuda_on_cpu::bits_as<double>(x); }
inline long long __double_as_longlong(double x) { return cuda_on_cpu::bits_as<long long>(x); }

struct __half {
  unsigned short x;
};
struct __nv_bfloat16 {
  unsigned short x;
};
using __half_raw = __half;
using __nv_bfloat16_raw = __nv_bfloat16;
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half half) { return half.x; }
inline float __half2float(__half half) {
  const int exponent = half.x >> 10 & 31, mantissa = half.x & 1023;
  float x = exponent == 0 ? ldexpf(mantissa, -24) : ldexpf(1024 + mantissa, exponent - 25);
  if (exponent == 31) x = mantissa == 0 ? INFINITY : NAN;
  return copysignf(x, half.x & 0x8000 ? -1.0f : 1.0f);
}
inline __half __float2half_rn(float x) {
  if (isnan(x)) return {0x7fff};
  const float size = fabsf(x);
  const int exponent = size < 0x1p-14f ? -14 : ilogbf(size);  // of the step to the next: 10 less
  unsigned bits = 0x7c00;
  if (size < 65520) bits = ((exponent + 14) << 10) + int(nearbyintf(ldexpf(size, 10 - exponent)));
  return {static_cast<unsigned short>(bits | (signbit(x) ? 0x8000 : 0))};
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 half) { return half.x; }
inline float __bfloat162float(__nv_bfloat16 half) { return __uint_as_float(half.x << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  if (isnan(x)) return {0x7fff};
  const unsigned bits = __float_as_uint(x);
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevice = 101,
  cudaErrorCooperativeLaunchTooLarge = 720,
  cudaErrorNotSupported = 801
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrCooperativeLaunch = 95
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost, cudaMemcpyDefault = 4 };
using cudaStream_t = struct CUstream_st*;

namespace cuda_on_cpu {

inline thread_local int device = 0;
inline thread_local cudaError_t last_error = cudaSuccess;

inline cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

inline cudaError_t give(int* place, long long value) {
  *place = int(value);
  return cudaSuccess;
}

inline int resident_blocks(int threads) {
  return int(std::min<long long>(runtime.blocks_per_sm, 2048 / threads));
}

template <class... P, size_t... I>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, void** arguments, size_t shared,
                   bool cooperative, std::index_sequence<I...>) {
  size_t bytes = 0;
  ((bytes = (bytes + alignof(P) - 1) / alignof(P) * alignof(P) + sizeof(P)), ...);
  if (bytes > 32764) fail("a kernel has %zu bytes of parameters, more than 32764", bytes);
  if (grid.y * grid.z * block.y * block.z != 1 || shared != 0)
    fail("a second dimension and dynamic shared memory are not emulated");
  if (const long long error = runtime.next_error.exchange(0)) return report(cudaError_t(error));
  if (grid.x == 0 || block.x == 0 || block.x > 1024) return report(cudaErrorInvalidConfiguration);
  if (cooperative && runtime.cooperative == 0) return report(cudaErrorNotSupported);
  if (cooperative && grid.x > runtime.sm_count * resident_blocks(int(block.x)))
    return report(cudaErrorCooperativeLaunchTooLarge);
  ++(cooperative ? runtime.cooperative_launches : runtime.launches);
  const auto call = [=] { kernel(*static_cast<P*>(arguments[I])...); };
  Launch launch(call, grid.x, block.x, cooperative);
  run(&launch);
  return cudaSuccess;
}

inline std::atomic<long long>& control(const char* name) {
#define CUDA_ON_CPU_NAMED(member, value) \
  {                                      \
    #member, &runtime.member             \
  }
  static const std::pair<const char*, std::atomic<long long>*> all[] = {
      CUDA_ON_CPU_CONTROLS(CUDA_ON_CPU_NAMED)};
  for (const auto& [known, member] : all)
    if (!strcmp(name, known)) return *member;
  fail("no control or counter is named '%s'", name);
}

}  // namespace cuda_on_cpu

template <class... P>
cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 grid, dim3 block, void** arguments,
                             size_t shared = 0, cudaStream_t = nullptr) {
  return cuda_on_cpu::launch(kernel, grid, block, arguments, shared, false,
                             std::index_sequence_for<P...>());
}
template <class... P>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(P...), dim3 grid, dim3 block,
                                        void** arguments, size_t shared = 0,
                                        cudaStream_t = nullptr) {
  return cuda_on_cpu::launch(kernel, grid, block, arguments, shared, true,
                             std::index_sequence_for<P...>());
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int threads,
                                                          size_t) {
  return cuda_on_cpu::give(blocks, cuda_on_cpu::resident_blocks(threads));
}

inline cudaError_t cudaPeekAtLastError() { return cuda_on_cpu::last_error; }
inline cudaError_t cudaGetLastError() {
  return std::exchange(cuda_on_cpu::last_error, cudaSuccess);
}
inline const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[32];
  std::snprintf(text, sizeof text, "cudaError_t %d", int(error));
  return text;
}

inline cudaError_t cudaGetDevice(int* device) {
  return cuda_on_cpu::give(device, cuda_on_cpu::device);
}
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= cuda_on_cpu::runtime.devices)
    return cuda_on_cpu::report(cudaErrorInvalidDevice);
  cuda_on_cpu::device = device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const char* name = attribute == cudaDevAttrMultiProcessorCount      ? "sm_count"
                     : attribute == cudaDevAttrL2CacheSize            ? "l2_bytes"
                     : attribute == cudaDevAttrComputeCapabilityMajor ? "compute_major"
                     : attribute == cudaDevAttrComputeCapabilityMinor ? "compute_minor"
                                                                      : "cooperative";
  return cuda_on_cpu::give(value, cuda_on_cpu::control(name));
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  return cuda_on_cpu::give(version, cuda_on_cpu::runtime.driver_version);
}
inline cudaError_t cudaMemsetAsync(void* p, int byte, size_t n, cudaStream_t = nullptr) {
  std::memset(p, byte, n);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind,
                                   cudaStream_t = nullptr) {
  std::memcpy(to, from, n);
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatus(cuda_on_cpu::runtime.capturing != 0);
  return cudaSuccess;
}

#define CUDA_ON_CPU_EXPORT extern "C" __attribute__((visibility("default"), used)) inline
CUDA_ON_CPU_EXPORT void cuda_on_cpu_seed(unsigned seed) { cuda_on_cpu::runtime.seed = seed; }
CUDA_ON_CPU_EXPORT void cuda_on_cpu_set(const char* name, long long value) {
  cuda_on_cpu::control(name) = value;
}
CUDA_ON_CPU_EXPORT int cuda_on_cpu_last_error() { return cuda_on_cpu::last_error; }
CUDA_ON_CPU_EXPORT long long cuda_on_cpu_get(const char* name) {
  return cuda_on_cpu::control(name);
}
