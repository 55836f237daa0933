// The first pass: one row for each tensor, and by the last block what follows from them all.
//
// Precision. A thread adds 32 elements in float32, in four sums of eight and these in a tree: 10
// roundings at most, a relative error of 10 * 2^-24 = 6e-7 whatever the elements are, and half of
// that in a 2-norm. From there on everything is float64.
#pragma once

#include <cfloat>

#include "blocks.cuh"
#include "elements.cuh"

namespace fastclip::cuda {

// A float32 sum of squares below this may have lost some to underflow, of which each is off by at
// most 2^-150: 32 of them by 2^-145, far below 2^-24 of any sum that passes.
constexpr double kSmallestSafeSum = 0x1p-100;

// What a thread keeps of a short run of elements.
template <class T, Norm N>
struct Run {
  using Product = typename T::Product;
  static constexpr int kSums = sizeof(Product) == 4 ? 4 : 2;
  static constexpr int kElements = 32;
  static constexpr int kTiles = kElements / (kLoads * T::kPerVector);

  Product sums[kSums] = {};
  Product largest = 0;

  // `place`: of the vector among those that a thread loads at once. Zeros are counted in float32,
  // where a comparison gives 1 or 0 and is added; an integer takes three instructions.
  __device__ void add(const Vector& v, int place, float& zeros) {
#pragma unroll
    for (int i = 0; i < T::kPerVector; ++i) {
      const Product x = T::get(v, i), magnitude = std::fabs(x);
      Product& sum = sums[(place * T::kPerVector + i) % kSums];
      sum = add_power<N>(sum, N == Norm::kSum ? magnitude : x);
      largest = std::fmax(largest, magnitude);  // drops NaN, which the sum keeps
      zeros += x == 0 ? 1.0f : 0.0f;
    }
  }

  __device__ Product sum() const {
    Product tree[kSums];
    for (int i = 0; i < kSums; ++i) tree[i] = sums[i];
    for (int width = kSums / 2; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) tree[i] += tree[i + width];
    return tree[0];
  }

  // Whether the sum holds what was added: all of it finite, and nothing lost.
  __device__ bool holds(Product sum) const {
    if (!(sum <= (sizeof(Product) == 4 ? FLT_MAX : DBL_MAX))) return false;
    return sizeof(Product) == 8 || N != Norm::kSquares || largest == 0 || sum >= kSmallestSafeSum;
  }
};

// What a thread keeps of a part. It has at most 2^22 of its elements, so that float32 counts.
template <class T>
struct Share {
  RowOf<typename T::Product, unsigned> row;
  float zeros;
};

// A tile, of which `left` vectors exist; p is this thread's first one, and they lie kThreads apart.
template <class T, class Memory, Norm N>
__device__ inline void add_tile(const Vector* p, int left, Run<T, N>& run, float& zeros) {
  Vector v[kLoads];
  if (left >= kTileVectors) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) v[i] = Memory::load(p + i * kThreads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) run.add(v[i], i, zeros);
    return;
  }
  const int mine = left - int(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    v[i] = mine > i * kThreads ? Memory::load(p + i * kThreads) : Vector{};
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    if (mine > i * kThreads) run.add(v[i], i, zeros);
}

// A run again, each element in float64, with what is not finite counted. Its zeros have been.
template <class T, class Memory, Norm N>
__device__ inline void add_exactly(const Vector* p, int left, Share<T>& share) {
  decltype(share.row) row = {};
#pragma unroll 1
  for (int mine = left - int(threadIdx.x); mine > 0; mine -= kThreads, p += kThreads) {
    const auto* elements = reinterpret_cast<const typename T::Bits*>(p);
#pragma unroll 1
    for (int i = 0; i < T::kPerVector; ++i)
      add_element(row, T::value(Memory::load(elements + i)), N);
  }
  row.zero = 0;
  combine(share.row, row, N);
}

template <class T, class Memory, Norm N>
__device__ inline void measure_span(const Span<T>& span, Share<T>& share) {
  constexpr int kRun = kTileVectors * Run<T, N>::kTiles;
  const Vector* p = span.vector(threadIdx.x);
#pragma unroll 1
  for (int left = int(span.vectors); left > 0; left -= kRun, p += kRun) {
    Run<T, N> run;
#pragma unroll 1
    for (int tile = 0; tile < kRun && tile < left; tile += kTileVectors)
      add_tile<T, Memory>(p + tile, left - tile, run, share.zeros);
    const auto sum = run.sum();
    if (!run.holds(sum)) {
      add_exactly<T, Memory, N>(p, left < kRun ? left : kRun, share);
      continue;
    }
    share.row.power += sum;
    share.row.max_abs = std::fmax(share.row.max_abs, run.largest);
  }
  if (threadIdx.x < span.edges())
    add_element(share.row, T::value(Memory::load(span.edge(threadIdx.x))), N);
}

template <class T, class Memory, Norm N>
__device__ inline RowOf<double, unsigned> measure_part(const Part& part, uint64_t address,
                                                       const DeviceLayout* layouts) {
  Share<T> share = {};
  if (part.layout < 0) {
    measure_span<T, Memory, N>(Span<T>(address, part), share);
  } else {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < part.n; i += kThreads)
      add_element(share.row, T::value(Memory::load(strided_element<T>(address, part, layouts, i))),
                  N);
  }
  const auto& row = share.row;
  return {row.power, row.max_abs, row.nan, row.inf, row.zero + unsigned(share.zeros)};
}

template <class Memory, Norm N>
__device__ inline RowOf<double, unsigned> measure_part(const Part& part, uint64_t address,
                                                       const DeviceLayout* layouts) {
  switch (Type(part.type)) {
    case Type::kFloat:
      return measure_part<Float, Memory, N>(part, address, layouts);
    case Type::kBFloat16:
      return measure_part<BFloat16, Memory, N>(part, address, layouts);
    case Type::kHalf:
      return measure_part<Half, Memory, N>(part, address, layouts);
    default:
      return measure_part<Double, Memory, N>(part, address, layouts);
  }
}

__device__ inline void finish_row(const Call& call, int32_t place, Row row) {
  const Number& inv_scale = call.inv_scale;
  const double factor = inv_scale.pointer ? __ldg(inv_scale.pointer) : inv_scale.value;
  if (factor != 1) unscale(row, factor, call.norm);
  store_row(call.table + place, row);
}

// Thread 0 has the row of a part. The block that brings a tensor's last one combines them all, in
// their order.
__device__ inline void deliver(const Call& call, const Part& part, const Row& row) {
  if (part.parts == 1) {
    if (threadIdx.x == 0) finish_row(call, part.row, row);
    return;
  }
  if (threadIdx.x == 0) store_row(call.tables.slots + part.slot, row);
  if (!is_last(call.tables.arrived + 1 + part.first_slot, unsigned(part.parts))) return;
  Row whole = {};
  for (int i = int(threadIdx.x); i < part.parts; i += kThreads)
    combine(whole, load_row(call.tables.slots + part.first_slot + i), call.norm);
  combine_threads(whole, call.norm);
  if (threadIdx.x == 0) finish_row(call, part.row, whole);
}

// The total norm, the coefficient and the factor, from the table.
__device__ inline void finish_list(const Call& call) {
  Row all = {};
  for (int i = int(threadIdx.x); i < call.rows; i += kThreads) {
    const Row* row = call.table + i;
    all.power = combine_power(all.power, __ldcg(&row->power), call.norm);
    if (call.skip) all.nan += __ldcg(&row->nan) + __ldcg(&row->inf);
  }
  combine_threads(all, call.norm);
  if (threadIdx.x != 0) return;
  const double total = total_norm(all.power, call.norm);
  const Number &limit = call.max_norm, &inv_scale = call.inv_scale;
  const Factors by = factors(total, limit.pointer ? __ldg(limit.pointer) : limit.value,
                             inv_scale.pointer ? __ldg(inv_scale.pointer) : inv_scale.value,
                             call.skip && all.nan > 0);
  if (call.wide) {
    __stcg(static_cast<double*>(call.total), total);
  } else {
    __stcg(static_cast<float*>(call.total), float(total));
  }
  __stcg(call.coef, by.coef);
  __stcg(call.tables.factor, by.factor);
}

template <class Memory, Norm N>
__device__ inline void measure(const Call& call, const uint64_t* addresses) {
  for_parts<false>(call.tables, addresses, [&call](const Part& part, uint64_t address) {
    RowOf<double, unsigned> sums = measure_part<Memory, N>(part, address, call.tables.layouts);
    combine_threads(sums, N);
    Row row = {sums.power, sums.max_abs, double(sums.nan), double(sums.inf), double(sums.zero)};
    if (call.norm == Norm::kCount || call.norm == Norm::kMax)
      row.power = power_of(row, part.n, call.norm);
    deliver(call, part, row);
  });
  if (call.total && is_last(call.tables.arrived, gridDim.x)) finish_list(call);
}

}  // namespace fastclip::cuda
