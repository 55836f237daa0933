// The kernels, written once on GCC/Clang vector types and compiled once per SIMD level with that
// level's flags. The including file defines FASTCLIP_VECTOR_BYTES and FASTCLIP_LEVEL. Everything
// here has internal linkage, and no standard template is used: the linker must never pick another
// level's copy of it.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "kernels.h"

namespace fastclip::cpu {
namespace {

// Sums kept side by side: enough to hide the latency of fma (4 cycles, two a cycle).
constexpr int kSums = 8;
template <class T>
constexpr int64_t kStep = kSums * (kBytes / int64_t(sizeof(typename T::Sum)));  // elements
// Each float32 lane takes at most 16 terms of one sign before it is added up in float64, so that
// the relative error of a sum is below 15 * 2^-24 = 9e-7 whatever the terms are.
template <class T>
constexpr int64_t kBlock = 16 * kStep<T>;

// A float32 sum below this may have lost terms to underflow: 2048 of them, each off by at most
// 2^-126 (were they flushed to zero), against the 2^-24 of the sum's own precision.
constexpr double kSmallestSafeSum = 0x1p-90;

// Of all lanes, in float64.
template <class T>
inline double total(const Vec<typename T::Sum>* sums, int count) {
  constexpr int kLanes = kBytes / int(sizeof(typename T::Sum));
  double lanes[kLanes] = {};
  for (int k = 0; k < count; ++k)
    for (int i = 0; i < kLanes; ++i) lanes[i] += double(sums[k][i]);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

template <class T>
struct Block {
  double sum;
  typename T::Bits largest;
  int64_t zeros;
};

template <class T, Norm N>
struct Lanes {
  using Sums = Vec<typename T::Sum>;
  using Ints = Vec<typename T::Bits>;
  Sums sums[kSums] = {};
  Ints largest = {}, zeros = {};

  // kStep<T> elements. Magnitudes are compared as integers, whose order is that of the numbers and
  // puts infinity and NaN on top: one maximum finds the largest and tells whether all are finite.
  inline void add(const char* x) {
#pragma GCC unroll 8
    for (int k = 0; k < kSums; k += T::kWiden) {
      const Ints bits = load<Ints>(x + (k / T::kWiden) * kBytes);
      const Ints magnitude = bits & T::kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
      zeros -= magnitude == 0;
      if constexpr (N == Norm::kSum || N == Norm::kSquares) {
        Sums wide[T::kWiden] = {};
        T::widen(N == Norm::kSum ? magnitude : bits, wide);
        for (int w = 0; w < T::kWiden; ++w) sums[k + w] = add_power<N>(sums[k + w], wide[w]);
      }
    }
  }

  inline Block<T> reduce() const {
    constexpr int kInts = kBytes / int(sizeof(typename T::Bits));
    Block<T> block{0, 0, 0};
    for (int i = 0; i < kInts; ++i) {
      block.largest = largest[i] > block.largest ? largest[i] : block.largest;
      block.zeros += zeros[i];
    }
    if constexpr (N == Norm::kSum || N == Norm::kSquares) block.sum = total<T>(sums, kSums);
    return block;
  }
};

template <class T, Norm N>
inline Block<T> add_block(const char* x, int64_t n) {
  Lanes<T, N> lanes;
  int64_t i = 0;
  for (; i + kStep<T> <= n; i += kStep<T>) lanes.add(x + i * kSize<T>);
  if (i == n) return lanes.reduce();
  char tail[kStep<T> * kSize<T>] = {};
  std::memcpy(tail, x + i * kSize<T>, size_t((n - i) * kSize<T>));
  lanes.add(tail);
  Block<T> block = lanes.reduce();
  block.zeros -= i + kStep<T> - n;
  return block;
}

// The sum again, in float64: for the rare block whose float32 sum was out of range.
template <class T, Norm N>
__attribute__((noinline)) double wide_sum(const char* x, int64_t n) {
  typedef double Wide __attribute__((vector_size(2 * kBytes)));  // as many as there are Floats
  constexpr int kLanes = kBytes / int(sizeof(float));
  constexpr int64_t kPerVector = kBytes / kSize<T>;
  Wide sums[T::kWiden] = {};
  double sum = 0;
  int64_t i = 0;
  for (; i + kPerVector <= n; i += kPerVector) {
    Floats floats[T::kWiden] = {};
    T::widen(load<Vec<typename T::Bits>>(x + i * kSize<T>) & T::kMagnitude, floats);
    for (int w = 0; w < T::kWiden; ++w) {
      const Wide wide = __builtin_convertvector(floats[w], Wide);
      sums[w] = add_power<N>(sums[w], wide);
    }
  }
  for (; i < n; ++i) {
    const double v = T::value(load_bits<T>(x, i) & T::kMagnitude);
    sum = add_power<N>(sum, v);
  }
  for (const Wide& part : sums)
    for (int lane = 0; lane < kLanes; ++lane) sum += part[lane];
  return sum;
}

// The rare block with a NaN or an infinity, which is then its power too whatever else is in it.
template <class T, Norm N>
__attribute__((noinline)) void add_nonfinite(const char* x, int64_t n, int64_t zeros, Row& row) {
  using Bits = typename T::Bits;
  int64_t nan = 0, inf = 0;
  Bits largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits magnitude = load_bits<T>(x, i) & T::kMagnitude;
    nan += magnitude > T::kNonFinite;
    inf += magnitude == T::kNonFinite;
    const Bits finite = magnitude < T::kNonFinite ? magnitude : Bits(0);
    largest = finite > largest ? finite : largest;
  }
  Row part = {0, double(T::value(largest)), double(nan), double(inf), double(zeros)};
  part.power = power_of(part, double(n), N == Norm::kCount ? N : Norm::kMax);
  combine(row, part, N);
}

template <class T, Norm N>
void measure_run(const char* x, int64_t n, Row& row) {
  constexpr bool kSummed = N == Norm::kSum || N == Norm::kSquares;
  for (int64_t i = 0; i < n; i += kBlock<T>) {
    const char* start = x + i * kSize<T>;
    const int64_t length = n - i < kBlock<T> ? n - i : kBlock<T>;
    Block<T> block = add_block<T, N>(start, length);
    if (block.largest >= T::kNonFinite) {
      add_nonfinite<T, N>(start, length, block.zeros, row);
      continue;
    }
    if constexpr (kSummed && sizeof(typename T::Sum) == sizeof(float))
      if (block.largest != 0 && !(block.sum >= kSmallestSafeSum && block.sum <= DBL_MAX))
        block.sum = wide_sum<T, N>(start, length);
    Row part = {block.sum, double(T::value(block.largest)), 0, 0, double(block.zeros)};
    if constexpr (!kSummed) part.power = power_of(part, double(length), N);
    combine(row, part, N);
  }
}

template <class T>
void measure(const char* x, int64_t n, Norm norm, Row& row) {
  switch (norm) {
    case Norm::kCount:
      return measure_run<T, Norm::kCount>(x, n, row);
    case Norm::kSum:
      return measure_run<T, Norm::kSum>(x, n, row);
    case Norm::kSquares:
      return measure_run<T, Norm::kSquares>(x, n, row);
    case Norm::kMax:
      return measure_run<T, Norm::kMax>(x, n, row);
  }
}

// Keeps the first n elements of a vector, 0 < n < kPerVector, when loaded from kPerVector - n on.
template <class T>
struct Mask {
  static constexpr int kPerVector = kBytes / int(kSize<T>);
  typename T::Bits bits[2 * kPerVector] = {};
  constexpr Mask() {
    for (int i = 0; i < kPerVector; ++i) bits[i] = -1;
  }
};

// The sum of squares of at most kBlock<T> elements. Memory up to `end` may be read, and `last` is
// the mask of the elements that fill no vector.
template <class T>
inline double squares(const char* x, int64_t n, Vec<typename T::Bits> last, const char* end) {
  using Ints = Vec<typename T::Bits>;
  using Sums = Vec<typename T::Sum>;
  constexpr int64_t kPerVector = kBytes / kSize<T>;
  Sums sums[kSums] = {}, rest[T::kWiden] = {};
  Ints seen = {};
  const auto add = [&seen](Ints bits, Sums* to) {
    seen |= bits & T::kMagnitude;
    Sums wide[T::kWiden] = {};
    T::widen(bits, wide);
    for (int w = 0; w < T::kWiden; ++w) to[w] = add_power<Norm::kSquares>(to[w], wide[w]);
  };
  int64_t i = 0;
  for (; i + kStep<T> <= n; i += kStep<T>) {
#pragma GCC unroll 8
    for (int k = 0; k < kSums; k += T::kWiden)
      add(load<Ints>(x + i * kSize<T> + (k / T::kWiden) * kBytes), sums + k);
  }
  double sum = i > 0 ? total<T>(sums, kSums) : 0;
  if (i < n) {
    for (; i + kPerVector <= n; i += kPerVector) add(load<Ints>(x + i * kSize<T>), rest);
    if (i < n) {
      const char* from = x + i * kSize<T>;
      char tail[kBytes] = {};
      if (end - from < kBytes)
        from = static_cast<const char*>(std::memcpy(tail, from, size_t((n - i) * kSize<T>)));
      add(load<Ints>(from) & last, rest);
    }
    sum += total<T>(rest, T::kWiden);
  }
  if constexpr (sizeof(typename T::Sum) == sizeof(float)) {
    if (sum >= kSmallestSafeSum && sum <= DBL_MAX) return sum;
    for (int k = 0; k < kPerVector; ++k)
      if (seen[k] != 0) return wide_sum<T, Norm::kSquares>(x, n);
  }
  return sum;
}

template <class T>
void add_squares(const char* x, int64_t n, int64_t rows, double* powers) {
  static constexpr Mask<T> kMask;
  const char* end = x + rows * n * kSize<T>;
  const auto mask =
      load<Vec<typename T::Bits>>(kMask.bits + kMask.kPerVector - n % kMask.kPerVector);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < n; i += kBlock<T>) {
      const int64_t length = n - i < kBlock<T> ? n - i : kBlock<T>;
      powers[row] += squares<T>(x + (row * n + i) * kSize<T>, length, mask, end);
    }
}

template <class T>
void scale(char* x, int64_t n, double coef) {
  using Ints = Vec<typename T::Bits>;
  constexpr int64_t kPerVector = kBytes / kSize<T>;
  const auto c = typename T::Sum(coef);
  int64_t i = 0;
  for (; i + kPerVector <= n; i += kPerVector) {
    Vec<typename T::Sum> wide[T::kWiden] = {};
    T::widen(load<Ints>(x + i * kSize<T>), wide);
    for (int w = 0; w < T::kWiden; ++w) wide[w] *= c;
    store(x + i * kSize<T>, T::narrow(wide));
  }
  for (; i < n; ++i) {
    const auto bits = T::bits(T::value(load_bits<T>(x, i)) * c);
    std::memcpy(x + i * kSize<T>, &bits, sizeof bits);
  }
}

constexpr Kernels kKernels = {
    FASTCLIP_LEVEL,
    {measure<Float>, measure<BFloat16>, measure<Half>, measure<Double>},
    {add_squares<Float>, add_squares<BFloat16>, add_squares<Half>, add_squares<Double>},
    {scale<Float>, scale<BFloat16>, scale<Half>, scale<Double>},
};

}  // namespace
}  // namespace fastclip::cpu
