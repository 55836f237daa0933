// What the threads of a block do together: fetch the parts they work on, add up their rows, find
// out which block came last.
#pragma once

#include "arguments.h"

namespace fastclip::cuda {

constexpr unsigned kAllLanes = 0xffffffff;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

// For all lanes of a warp what one of them loads.
template <class T>
__device__ inline T load_for_warp(const T* p) {
  T value{};
  if (threadIdx.x % kWarp == 0) value = __ldcg(p);
  return __shfl_sync(kAllLanes, value, 0);
}

// A part, and where its tensor lies if the arguments do not say.
struct Work {
  Part part;
  uint32_t address_low, address_high;
};
constexpr int kWorkWords = sizeof(Work) / 4;

__device__ inline uint32_t fetch_word(const Tables& tables, int i) {
  const int word = int(threadIdx.x);
  if (word < kPartWords) return __ldg(reinterpret_cast<const uint32_t*>(tables.parts + i) + word);
  if (word < kWorkWords && tables.addresses)
    return __ldg(reinterpret_cast<const uint32_t*>(tables.addresses + i) + word - kPartWords);
  return 0;
}

// Calls f(part, address) for the parts of this block, one after the other or from the last to the
// first. While one is worked on the next is on its way.
template <bool kBackwards, class F>
__device__ inline void for_parts(const Tables& tables, const uint64_t* addresses, const F& f) {
  __shared__ Work works[2];  // in turn: one barrier between a part's arrival and its use is enough
  __shared__ int range[2];
  if (threadIdx.x < 2) range[threadIdx.x] = __ldg(tables.first_part + blockIdx.x + threadIdx.x);
  __syncthreads();
  const int begin = range[0], end = range[1], n = end - begin;
  uint32_t next = n > 0 ? fetch_word(tables, kBackwards ? end - 1 : begin) : 0;
  for (int i = 0; i < n; ++i) {
    Work& work = works[i % 2];
    if (threadIdx.x < kWorkWords) reinterpret_cast<uint32_t*>(&work)[threadIdx.x] = next;
    __syncthreads();
    if (i + 1 < n) next = fetch_word(tables, kBackwards ? end - 2 - i : begin + 1 + i);
    const uint64_t address = tables.addresses ? uint64_t(work.address_high) << 32 | work.address_low
                                              : addresses[work.part.row];
    f(work.part, address);
  }
}

__device__ inline double shuffle_down(double value, int lanes) {
  return __shfl_down_sync(kAllLanes, value, lanes);
}
__device__ inline unsigned shuffle_down(unsigned value, int lanes) {
  return __shfl_down_sync(kAllLanes, value, lanes);
}

// Lane 0 gets the rows of `width` lanes combined, in an order that depends on nothing.
template <class Count>
__device__ inline void combine_lanes(RowOf<double, Count>& row, int width, Norm norm) {
  const bool finite = !__any_sync(kAllLanes, row.nan > 0 || row.inf > 0);  // as nearly always
  for (int lanes = width / 2; lanes > 0; lanes /= 2) {
    RowOf<double, Count> other = {shuffle_down(row.power, lanes), shuffle_down(row.max_abs, lanes),
                                  0, 0, shuffle_down(row.zero, lanes)};
    if (!finite) {
      other.nan = shuffle_down(row.nan, lanes);
      other.inf = shuffle_down(row.inf, lanes);
    }
    combine(row, other, norm);
  }
}

// Thread 0 gets the rows of all threads combined.
template <class Count>
__device__ inline void combine_threads(RowOf<double, Count>& row, Norm norm) {
  __shared__ RowOf<double, Count> warps[kWarps];
  combine_lanes(row, kWarp, norm);
  __syncthreads();  // whoever reads what was here before
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = row;
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  row = warps[threadIdx.x % kWarps];
  combine_lanes(row, kWarps, norm);
}

// Whether this block is the last of n to come here; then the counter is 0 again. What thread 0 of
// any of them has written before, all threads of the last one see after it: thread 0's fence and
// increment release it, its fence after the last increment acquires it, and the barrier hands it on
// to the other threads, so that they need no fence. Which block is last decides nothing but who
// does the rest.
__device__ inline bool is_last(unsigned* arrived, unsigned n) {
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrived, 1u) == n - 1;
    if (last) {
      __threadfence();
      __stcg(arrived, 0u);
    }
  }
  return __syncthreads_or(last);
}

__device__ inline void store_row(Row* p, const Row& row) {
  __stcg(&p->power, row.power);
  __stcg(&p->max_abs, row.max_abs);
  __stcg(&p->nan, row.nan);
  __stcg(&p->inf, row.inf);
  __stcg(&p->zero, row.zero);
}

__device__ inline Row load_row(const Row* p) {
  return {__ldcg(&p->power), __ldcg(&p->max_abs), __ldcg(&p->nan), __ldcg(&p->inf),
          __ldcg(&p->zero)};
}

}  // namespace fastclip::cuda
