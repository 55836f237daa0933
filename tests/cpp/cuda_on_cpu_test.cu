// Kernels with known answers, for the test of tests/cuda_on_cpu.h itself; nvcc compiles them too.
#ifndef FASTCLIP_CUDA_ON_CPU
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

constexpr int THREADS = 256;
constexpr unsigned FULL = 0xffffffff;

enum Fault { NONE, READ_TOO_EARLY, WRITTEN_TOO_EARLY, WRONG_COMBINE };

// The sum over the block, in thread 0.
template <Fault fault>
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float of_warp[THREADS / 32];
  for (int offset = fault == WRONG_COMBINE ? 8 : 16; offset > 0; offset /= 2)
    x += __shfl_down_sync(FULL, x, offset);
  if (fault != WRITTEN_TOO_EARLY) __syncthreads();  // an earlier sum has been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  if (fault != READ_TOO_EARLY) __syncthreads();
  x = threadIdx.x < THREADS / 32 ? of_warp[threadIdx.x] : 0.0f;
  if (threadIdx.x < 32)
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL, x, offset);
  return x;
}

struct SumArguments {
  const float* x;  // n of them, 16-byte aligned
  int n;
  float* partials;     // one for each block
  unsigned* finished;  // 0 before and after
  float* total;
};

template <Fault fault>
__global__ void __launch_bounds__(THREADS) sum_kernel(const __grid_constant__ SumArguments args) {
  __shared__ bool is_last;
  float sum = 0;
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < args.n / 4; i += gridDim.x * THREADS) {
    const float4 four = __ldcs(reinterpret_cast<const float4*>(args.x) + i);
    sum += four.x + four.y + four.z + four.w;
  }
  if (blockIdx.x == 0 && threadIdx.x < args.n % 4)
    sum += __ldg(args.x + args.n / 4 * 4 + threadIdx.x);
  sum = block_sum<fault>(sum);
  if (threadIdx.x == 0) {
    __stcg(args.partials + blockIdx.x, sum);
    __threadfence();
    is_last = atomicAdd(args.finished, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  sum = threadIdx.x < gridDim.x ? __ldcg(args.partials + threadIdx.x) : 0.0f;
  sum = block_sum<fault>(sum);
  if (threadIdx.x == 0) {
    __stcg(args.total, sum);
    atomicExch(args.finished, 0);
  }
}

template <Fault fault>
cudaError_t launch_sum(int blocks, SumArguments args) {
  void* pointers[] = {&args};
  return cudaLaunchKernel(sum_kernel<fault>, dim3(blocks), dim3(THREADS), pointers, 0, nullptr);
}

template <Fault fault>
__global__ void four_sums_kernel(float* sums) {
  for (int i = 0; i < 4; ++i) {
    const float sum = block_sum<fault>(threadIdx.x + i);
    if (threadIdx.x == 0) __stcg(sums + i, sum);
  }
}

template <Fault fault>
cudaError_t launch_four_sums(float* sums) {
  void* pointers[] = {&sums};
  return cudaLaunchKernel(four_sums_kernel<fault>, dim3(1), dim3(THREADS), pointers, 0, nullptr);
}

// Divides x by its sum: no block may divide before all have added.
__global__ void normalize_kernel(float* x, int n, float* partials) {
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  const int i = blockIdx.x * THREADS + threadIdx.x;
  const float value = i < n ? __ldlu(x + i) : 0.0f;
  const float sum = block_sum<NONE>(value);
  if (threadIdx.x == 0) __stwb(partials + blockIdx.x, sum);
  grid.sync();
  float total = 0;
  for (int block = 0; block < gridDim.x; ++block) total += __ldcg(partials + block);
  grid.sync();
  if (i < n) __stcs(x + i, value / total);
}

cudaError_t launch_normalize(int blocks, float* x, int n, float* partials) {
  void* pointers[] = {&x, &n, &partials};
  return cudaLaunchCooperativeKernel(normalize_kernel, dim3(blocks), dim3(THREADS), pointers, 0,
                                     nullptr);
}

// One warp: what each lane gets from the operations on a warp and on a block.
__global__ void warp_kernel(long long* out) {
  const int lane = threadIdx.x;
  const long long wide = (1ll << 40) + lane;
  __stcg(out + lane, __shfl_down_sync(FULL, wide, 3));
  __stcg(out + 32 + lane, static_cast<long long>(__shfl_xor_sync(FULL, 0.5 + lane, 5) * 2));
  __stcg(out + 64 + lane, static_cast<long long>(__shfl_sync(FULL, 7u * lane, 9)));
  __stcg(out + 96 + lane, static_cast<long long>(__ballot_sync(FULL, lane % 3 == 0)));
  const int any = __any_sync(FULL, lane == 31) + 2 * __any_sync(FULL, lane == 32);
  const int all = __all_sync(FULL, lane < 32) + 2 * __all_sync(FULL, lane < 31);
  const int of_block = __syncthreads_or(lane == 17) + 2 * __syncthreads_or(lane > 31);
  __syncwarp();
  __stcg(out + 128 + lane, static_cast<long long>(100 * any + 10 * all + of_block));
}

cudaError_t launch_warp(long long* out) {
  void* pointers[] = {&out};
  return cudaLaunchKernel(warp_kernel, dim3(1), dim3(32), pointers, 0, nullptr);
}

struct Large {
  int values[8188];
};

__global__ void large_kernel(const __grid_constant__ Large large, unsigned* sum) {
  unsigned own = 0;
  for (int i = threadIdx.x; i < 8188; i += blockDim.x) own += large.values[i];
  atomicAdd(sum, own);
}

// To the halves, and back.
__global__ void halves_kernel(const float* x, unsigned short* half, unsigned short* bfloat16,
                              float* of_half, float* of_bfloat16, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const __half h = __float2half_rn(__ldg(x + i));
  const __nv_bfloat16 b = __float2bfloat16_rn(__ldg(x + i));
  __stcg(half + i, __half_as_ushort(h));
  __stcg(bfloat16 + i, __bfloat16_as_ushort(b));
  __stcg(of_half + i, __half2float(__ushort_as_half(__half_as_ushort(h))));
  __stcg(of_bfloat16 + i, __bfloat162float(__ushort_as_bfloat16(__bfloat16_as_ushort(b))));
}

#ifdef FASTCLIP_CUDA_ON_CPU

namespace {

int failures = 0;

void expect_equal(const char* what, long long found, long long wanted) {
  if (found == wanted) return;
  ++failures;
  std::printf("%s: %lld, not %lld\n", what, found, wanted);
}

// Orders in which a planted fault shows.
void expect_some(const char* what, int found) {
  std::printf("%s: in %d of 20 orders\n", what, found);
  failures += found == 0;
}

// How many seeds give a wrong sum of 1 + 2 + ... + n; every partial sum is exact in any order.
template <Fault fault>
int wrong_sums(int seeds, int n, int blocks) {
  std::vector<float> x(n + 4), partials(blocks);
  float* aligned = x.data() + (16 - uintptr_t(x.data()) % 16) % 16 / 4;
  for (int i = 0; i < n; ++i) aligned[i] = i + 1;
  unsigned finished = 0;
  int wrong = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    float total = -1;
    cuda_on_cpu_seed(seed);
    cuda_on_cpu::runtime.reset_counters();
    expect_equal("launch",
                 launch_sum<fault>(blocks, {aligned, n, partials.data(), &finished, &total}), 0);
    wrong += total != 0.5f * n * (n + 1);
    expect_equal("finished", finished, 0);
    expect_equal("bytes read", cuda_on_cpu_get("bytes_read"), 4 * n + 4 * blocks);
    expect_equal("bytes written", cuda_on_cpu_get("bytes_written"), 4 * blocks + 4);
    expect_equal("launches", cuda_on_cpu_get("launches"), 1);
  }
  return wrong;
}

template <Fault fault>
int wrong_four_sums(int seeds) {
  int wrong = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    float sums[4];
    cuda_on_cpu_seed(seed);
    expect_equal("launch", launch_four_sums<fault>(sums), 0);
    bool same = true;
    for (int i = 0; i < 4; ++i) same &= sums[i] == THREADS * (THREADS - 1) / 2 + i * THREADS;
    wrong += !same;
  }
  return wrong;
}

void sums() {
  for (const int blocks : {1, 3, 8}) {
    expect_equal("wrong sums", wrong_sums<NONE>(100, 1003, blocks), 0);
    expect_equal("wrong combine", wrong_sums<WRONG_COMBINE>(20, 1003, blocks), 20);
    expect_some("read too early", wrong_sums<READ_TOO_EARLY>(20, 1003, blocks));
  }
  expect_equal("wrong of four sums", wrong_four_sums<NONE>(100), 0);
  expect_some("read too early", wrong_four_sums<READ_TOO_EARLY>(20));
  expect_some("written too early", wrong_four_sums<WRITTEN_TOO_EARLY>(20));
}

void cooperative() {
  constexpr int N = 2000;
  for (int seed = 0; seed < 20; ++seed) {
    std::vector<float> x(N), partials(8);
    for (int i = 0; i < N; ++i) x[i] = i % 16;
    cuda_on_cpu_seed(seed);
    cuda_on_cpu::runtime.reset_counters();
    expect_equal("launch", launch_normalize(8, x.data(), N, partials.data()), 0);
    int wrong = 0;
    for (int i = 0; i < N; ++i) wrong += x[i] != i % 16 / 15000.0f;
    expect_equal("wrong quotients", wrong, 0);
    expect_equal("cooperative launches", cuda_on_cpu_get("cooperative_launches"), 1);
    expect_equal("bytes read", cuda_on_cpu_get("bytes_read"), 4 * N + 4 * 8 * 8 * THREADS);
  }
}

void refused() {
  float x = 3, partial[9];
  cuda_on_cpu_set("sm_count", 4);
  cuda_on_cpu_set("blocks_per_sm", 2);
  expect_equal("9 blocks of 8", launch_normalize(9, &x, 1, partial), 720);
  expect_equal("peeked", cudaPeekAtLastError(), 720);
  expect_equal("last error", cudaGetLastError(), 720);
  expect_equal("cleared", cudaGetLastError(), 0);
  cuda_on_cpu_set("cooperative", 0);
  expect_equal("not cooperative", launch_normalize(1, &x, 1, partial), 801);
  cuda_on_cpu_set("cooperative", 1);
  cuda_on_cpu_set("next_error", 2);
  expect_equal("next error", launch_normalize(1, &x, 1, partial), 2);
  expect_equal("no block", launch_normalize(0, &x, 1, partial), 9);
  expect_equal("untouched", x, 3);
  expect_equal("launches", cuda_on_cpu_get("cooperative_launches"), 0);
  expect_equal("another device", cudaSetDevice(1), 101);
  cuda_on_cpu_set("devices", 2);
  expect_equal("second device", cudaSetDevice(1), 0);
  int device = -1, sms = 0, per_sm = 0;
  expect_equal("get device", cudaGetDevice(&device) + device, 1);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 1);
  expect_equal("SMs", sms, 4);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, normalize_kernel, THREADS, 0);
  expect_equal("blocks on an SM", per_sm, 2);
  cudaStreamCaptureStatus status;
  cuda_on_cpu_set("capturing", 1);
  expect_equal("capturing", cudaStreamIsCapturing(nullptr, &status) + status, 1);
}

void warps() {
  for (int seed = 0; seed < 20; ++seed) {
    long long out[160];
    cuda_on_cpu_seed(seed);
    expect_equal("launch", launch_warp(out), 0);
    for (int lane = 0; lane < 32; ++lane) {
      expect_equal("down", out[lane], (1ll << 40) + (lane + 3 < 32 ? lane + 3 : lane));
      expect_equal("xor", out[32 + lane], 2 * (lane ^ 5) + 1);
      expect_equal("from lane 9", out[64 + lane], 63);
      expect_equal("ballot", out[96 + lane], 0x49249249);
      expect_equal("any, all, or", out[128 + lane], 111);
    }
  }
}

void parameters() {
  static Large large;
  for (int i = 0; i < 8188; ++i) large.values[i] = i;
  unsigned sum = 0, *pointer = &sum;
  void* pointers[] = {&large, &pointer};
  expect_equal("launch", cudaLaunchKernel(large_kernel, dim3(3), dim3(THREADS), pointers), 0);
  expect_equal("sum", sum, 3u * (8187u * 8188 / 2));
}

// The value of a format with `bits` of mantissa, by definition; its exponents start at 2^lowest.
double value_of(int word, int bits, int lowest) {
  const int exponent = word >> bits, mantissa = word & ((1 << bits) - 1);
  if (exponent == 0) return std::ldexp(mantissa, lowest - bits);
  return std::ldexp((1 << bits) + mantissa, lowest + exponent - 1 - bits);
}

// Each positive number of the format, the middle to the next (a tie: to even) and its neighbours.
void halves(int bits, int lowest, int infinity, bool is_half) {
  std::vector<float> x;
  std::vector<int> wanted;
  for (int word = 0; word < infinity; ++word) {
    const double value = value_of(word, bits, lowest);
    const float middle = float((value + value_of(word + 1, bits, lowest)) / 2);
    const float points[] = {float(value), std::nextafter(middle, 0.0f), middle,
                            std::nextafter(middle, INFINITY)};
    const int rounded[] = {word, word, word + word % 2, word + 1};
    x.insert(x.end(), points, points + 4);
    wanted.insert(wanted.end(), rounded, rounded + 4);
  }
  x.insert(x.end(), {INFINITY, NAN});
  wanted.insert(wanted.end(), {infinity, 0x7fff});
  const int n = int(x.size());
  for (const float sign : {1.0f, -1.0f}) {
    std::vector<unsigned short> half(n), bfloat16(n);
    std::vector<float> of_half(n), of_bfloat16(n);
    std::vector<float> signed_x(n);
    for (int i = 0; i < n; ++i) signed_x[i] = std::copysign(x[i], sign);
    const float* in = signed_x.data();
    unsigned short *h = half.data(), *b = bfloat16.data();
    float *of_h = of_half.data(), *of_b = of_bfloat16.data();
    int count = n;
    void* pointers[] = {&in, &h, &b, &of_h, &of_b, &count};
    const dim3 blocks((n + THREADS - 1) / THREADS);
    expect_equal("launch", cudaLaunchKernel(halves_kernel, blocks, dim3(THREADS), pointers), 0);
    for (int i = 0; i < n; ++i) {
      const int flag = sign < 0 && wanted[i] != 0x7fff ? 0x8000 : 0;
      expect_equal("rounded", is_half ? h[i] : b[i], wanted[i] | flag);
      const float back = is_half ? of_h[i] : of_b[i];
      if (wanted[i] < infinity)
        expect_equal("back", back == sign * value_of(wanted[i], bits, lowest), true);
      else
        expect_equal("back", std::isnan(x[i]) ? std::isnan(back) : back == sign * INFINITY, true);
    }
  }
}

}  // namespace

int run_fault(const char* name);  // in cuda_on_cpu_faults.cu

int main(int count, char** arguments) {
  const char* name = count > 1 ? arguments[1] : "";
  if (!std::strcmp(name, "sums"))
    sums();
  else if (!std::strcmp(name, "cooperative"))
    cooperative();
  else if (!std::strcmp(name, "refused"))
    refused();
  else if (!std::strcmp(name, "warps"))
    warps();
  else if (!std::strcmp(name, "parameters"))
    parameters();
  else if (!std::strcmp(name, "half"))
    halves(10, -14, 0x7c00, true);
  else if (!std::strcmp(name, "bfloat16"))
    halves(7, -126, 0x7f80, false);
  else
    return run_fault(name);
  if (failures == 0) std::printf("%s: as expected\n", name);
  return failures != 0;
}

// For ctypes.
extern "C" __attribute__((visibility("default"))) int sum(const float* x, int n, int blocks,
                                                          float* total) {
  std::vector<float> partials(blocks);
  unsigned finished = 0;
  return launch_sum<NONE>(blocks, {x, n, partials.data(), &finished, total});
}

#endif
