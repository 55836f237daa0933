// The second pass: multiply in place. Each block goes backwards through what it has measured, whose
// end the second-level cache may still hold.
#pragma once

#include "blocks.cuh"
#include "elements.cuh"

namespace fastclip::cuda {

template <class T>
__device__ inline void scale_element(typename T::Bits* p, typename T::Product factor) {
  __stwb(p, T::bits(T::value(__ldcg(p)) * factor));
}

// A tile, of which `left` vectors exist; p is this thread's first one, and they lie kThreads apart.
template <class T>
__device__ inline void scale_tile(Vector* p, int left, typename T::Product factor) {
  Vector v[kLoads];
  if (left >= kTileVectors) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) v[i] = __ldcg(p + i * kThreads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) __stwb(p + i * kThreads, scaled<T>(v[i], factor));
    return;
  }
  const int mine = left - int(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) v[i] = mine > i * kThreads ? __ldcg(p + i * kThreads) : Vector{};
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    if (mine > i * kThreads) __stwb(p + i * kThreads, scaled<T>(v[i], factor));
}

template <class T>
__device__ inline void scale_part(const Part& part, uint64_t address, const DeviceLayout* layouts,
                                  double wide_factor) {
  const auto factor = typename T::Product(wide_factor);
  if (factor == 1) return;
  if (part.layout >= 0) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < part.n; i += kThreads)
      scale_element<T>(strided_element<T>(address, part, layouts, i), factor);
    return;
  }
  const Span<T> span(address, part);
  if (threadIdx.x < span.edges()) scale_element<T>(span.edge(threadIdx.x), factor);
  const int vectors = int(span.vectors);
#pragma unroll 1
  for (int tile = (vectors - 1) / kTileVectors * kTileVectors; tile >= 0; tile -= kTileVectors)
    scale_tile<T>(span.vector(tile + threadIdx.x), vectors - tile, factor);
}

__device__ inline void scale(const Call& call, const uint64_t* addresses) {
  const double* factors = call.factors;
  __shared__ double common;
  if (threadIdx.x == 0 && !call.factor_per_row) common = __ldcg(factors);
  __syncthreads();
  if (!call.factor_per_row && common == 1) return;
  for_parts<true>(call.tables, addresses, [&](const Part& part, uint64_t address) {
    const double factor = call.factor_per_row ? load_for_warp(factors + part.row) : common;
    const DeviceLayout* layouts = call.tables.layouts;
    switch (Type(part.type)) {
      case Type::kFloat:
        return scale_part<Float>(part, address, layouts, factor);
      case Type::kBFloat16:
        return scale_part<BFloat16>(part, address, layouts, factor);
      case Type::kHalf:
        return scale_part<Half>(part, address, layouts, factor);
      case Type::kDouble:
        return scale_part<Double>(part, address, layouts, factor);
    }
  });
}

}  // namespace fastclip::cuda
