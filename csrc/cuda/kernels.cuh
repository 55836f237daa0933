// The kernels, for one size of arguments: FASTCLIP_ARGUMENT_BYTES. Each size is a module of its
// own, so that a driver which cannot load the large one still has the small one.
//
//   call                                  launches         gradients read and written
//   measure                               1                1 x, nothing
//   scale                                 1                1 x, 1 x; nothing by a factor of 1
//   clip, not needed                      2                1 x, nothing
//   clip, needed                          2                2 x, 1 x, of which the L2 has the end
//   clip, max_norm a float and infinite   1                1 x, nothing
//   clip of at most half of the L2        1, cooperative   as above, the second time from the L2
//
// Whatever the dtypes and however many tensors; of more than fit into the arguments, addresses that
// have changed are stored before, 32 KiB of them to a launch. Bytes are counted by the tests on an
// emulated device: no GPU was at hand, nothing has been timed.
#pragma once

#include <algorithm>

#include "launch.h"
#include "measure.cuh"
#include "scale.cuh"

#ifndef FASTCLIP_CUDA_ON_CPU
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#endif

namespace fastclip::cuda {
namespace {

using Given = Arguments<capacity(FASTCLIP_ARGUMENT_BYTES)>;
using Store = Stored<stored_words(FASTCLIP_ARGUMENT_BYTES)>;
static_assert(sizeof(Given) <= FASTCLIP_ARGUMENT_BYTES && sizeof(Store) <= FASTCLIP_ARGUMENT_BYTES,
              "arguments have a limit");

template <Norm N>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    measure_kernel(const __grid_constant__ Given given) {
  measure<ReadOnly, N>(given.call, given.addresses);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    scale_kernel(const __grid_constant__ Given given) {
  scale(given.call, given.addresses);
}

// The last block to measure finishes the list before it comes to the barrier.
template <Norm N>
__global__ void __launch_bounds__(kThreads, kCooperativeBlocksPerSm)
    clip_kernel(const __grid_constant__ Given given) {
  measure<Written, N>(given.call, given.addresses);
  cooperative_groups::this_grid().sync();
  scale(given.call, given.addresses);
}

__global__ void store_kernel(const __grid_constant__ Store store) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < store.n) __stcg(store.target + i, store.words[i]);
}

int start(const Launch& launch) {
  Given given;
  given.call = launch.call;
  if (!launch.call.tables.addresses)
    std::copy_n(launch.addresses, launch.n_addresses, given.addresses);
  void* arguments[] = {&given};
  const dim3 grid(unsigned(launch.blocks)), block(kThreads);
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  // Norms that are no sums follow from the columns that kSum fills.
  const bool squares = launch.call.norm == Norm::kSquares;
  switch (launch.kernel) {
    case Kernel::kMeasure:
      return cudaLaunchKernel(squares ? measure_kernel<Norm::kSquares> : measure_kernel<Norm::kSum>,
                              grid, block, arguments, 0, stream);
    case Kernel::kScale:
      return cudaLaunchKernel(scale_kernel, grid, block, arguments, 0, stream);
    case Kernel::kClip:
      return cudaLaunchCooperativeKernel(
          squares ? clip_kernel<Norm::kSquares> : clip_kernel<Norm::kSum>, grid, block, arguments,
          0, stream);
  }
  return cudaErrorInvalidValue;
}

int store(uint64_t* target, const uint64_t* words, int n, void* stream) {
  Store store;
  store.target = target;
  store.n = n;
  std::copy_n(words, n, store.words);
  void* arguments[] = {&store};
  const dim3 grid(unsigned((n + kThreads - 1) / kThreads)), block(kThreads);
  return cudaLaunchKernel(store_kernel, grid, block, arguments, 0,
                          static_cast<cudaStream_t>(stream));
}

int resident(int* blocks) {
  int sum, squares;
  int error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&sum, clip_kernel<Norm::kSum>, kThreads, 0);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&squares, clip_kernel<Norm::kSquares>,
                                                          kThreads, 0);
  if (error == cudaSuccess) *blocks = std::min(sum, squares);
  return error;
}

constexpr Kernels kKernels = {capacity(FASTCLIP_ARGUMENT_BYTES),
                              stored_words(FASTCLIP_ARGUMENT_BYTES), start, store, resident};

}  // namespace
}  // namespace fastclip::cuda
