// One planted fault each: what tests/cuda_on_cpu.h, or a sanitizer under it, must stop.
#ifndef FASTCLIP_CUDA_ON_CPU
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#endif

#include <cstdio>
#include <cstring>
#include <type_traits>

constexpr unsigned FULL = 0xffffffff;

__global__ void read_past_end(const float* x, int n, float* out) {
  if (threadIdx.x <= n) __stcg(out + threadIdx.x, __ldg(x + threadIdx.x));
}

__global__ void write_past_end(float* x, int n) {
  if (threadIdx.x <= n) __stcg(x + threadIdx.x, 1.0f);
}

__device__ __noinline__ void put(float* shared, int i) { shared[i] = 1; }

__global__ void write_past_shared(float* x, int n) {
  __shared__ float shared[32];
  put(shared, threadIdx.x + (n == 1));
  __syncthreads();
  __stcg(x, shared[threadIdx.x]);
}

__global__ void index_past_shared(float* x, int n) {
  __shared__ float shared[32];
  shared[threadIdx.x + (n == 1)] = 1;
  __syncthreads();
  __stcg(x, shared[threadIdx.x]);
}

__global__ void misaligned(const float* x, float* out) {
  __stcg(out, __ldg(reinterpret_cast<const float4*>(x)).w);
}

__global__ void different_barriers() {
  if (threadIdx.x < 16)
    __syncthreads();
  else
    __syncthreads();
}

__global__ void barrier_and_vote() {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads_or(0);
}

__global__ void early_return() {
  if (threadIdx.x == 40) return;
  __syncthreads();
}

__global__ void different_shuffles(float* out) {
  float x = 1;
  if (threadIdx.x % 32 == 5)
    x = __shfl_down_sync(FULL, x, 1);
  else
    x = __shfl_xor_sync(FULL, x, 1);
  __stcg(out + threadIdx.x, x);
}

__global__ void shuffle_of_half(float* out) {
  float x = 1;
  if (threadIdx.x < 16) x = __shfl_down_sync(0xffff, x, 1);
  __stcg(out + threadIdx.x, x);
}

__global__ void shuffle(float* out) { __stcg(out + threadIdx.x, __shfl_down_sync(FULL, 1.0f, 16)); }

__global__ void grid_barrier() { cooperative_groups::this_grid().sync(); }

__global__ void grid_barrier_of_some() {
  if (blockIdx.x > 0) cooperative_groups::this_grid().sync();
}

__global__ void grid_barrier_of_some_threads() {
  if (threadIdx.x > 0) cooperative_groups::this_grid().sync();
}

#ifdef FASTCLIP_CUDA_ON_CPU

struct Large {
  int values[8192];
};

__global__ void too_large(const __grid_constant__ Large, unsigned) {}  // nvcc refuses to compile it

namespace {

struct Launcher {
  const char* name;
  bool found = false;

  template <class... P>
  void run(const char* kernel_name, void (*kernel)(P...), int blocks, int threads, bool cooperative,
           std::common_type_t<P>... parameters) {
    if (std::strcmp(name, kernel_name) != 0) return;
    found = true;
    void* pointers[] = {&parameters..., nullptr};
    if (cooperative)
      cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(threads), pointers);
    else
      cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), pointers);
  }
};

}  // namespace

#define LAUNCH(kernel, ...) launcher.run(#kernel, kernel, __VA_ARGS__)

int run_fault(const char* name) {
  Launcher launcher{name};
  alignas(16) float out[64] = {};
  float* x = new float[8]();
  LAUNCH(read_past_end, 1, 32, false, x, 8, out);
  LAUNCH(write_past_end, 1, 32, false, x, 8);
  LAUNCH(write_past_shared, 1, 32, false, x, 1);
  LAUNCH(index_past_shared, 1, 32, false, x, 1);
  LAUNCH(misaligned, 1, 32, false, x + 1, out);
  LAUNCH(different_barriers, 3, 64, false);
  LAUNCH(barrier_and_vote, 1, 64, false);
  LAUNCH(early_return, 1, 64, false);
  LAUNCH(different_shuffles, 1, 64, false, out);
  LAUNCH(shuffle_of_half, 1, 32, false, out);
  LAUNCH(shuffle, 1, 48, false, out);
  LAUNCH(grid_barrier, 2, 32, false);
  LAUNCH(grid_barrier_of_some, 2, 32, true);
  LAUNCH(grid_barrier_of_some_threads, 2, 32, true);
  LAUNCH(too_large, 1, 32, false, Large{}, 0u);
  if (!std::strcmp(name, "unknown_control")) cuda_on_cpu_set("sm_cuont", 1);
  delete[] x;
  if (!launcher.found) std::printf("no kernel is named '%s'\n", name);
  return launcher.found ? 0 : 2;
}

#endif
