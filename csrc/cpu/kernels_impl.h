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

// Sums in float64, as many side by side as there are lanes of sums in T::Sum.
template <class T>
struct Totals {
  static constexpr int kParts = int(sizeof(double) / sizeof(typename T::Sum));
  Doubles parts[kParts] = {};

  inline void add(const Vec<typename T::Sum>* sums, int count) {
    constexpr int kLanes = kBytes / int(sizeof(typename T::Sum));
    double lanes[kLanes] = {};
    for (int k = 0; k < count; ++k)
      for (int i = 0; i < kLanes; ++i) lanes[i] += double(sums[k][i]);
    for (int i = 0; i < kParts; ++i) parts[i] += load<Doubles>(lanes + i * kLanes / kParts);
  }

  inline double all() const {
    Doubles sum = parts[0];
    for (int i = 1; i < kParts; ++i) sum += parts[i];
    double lanes[kBytes / sizeof(double)];
    store(lanes, sum);
    return tree<kBytes / int(sizeof(double))>(lanes);
  }

 private:
  template <int kCount>
  static inline double tree(const double* x) {
    if constexpr (kCount == 1) {
      return x[0];
    } else {
      return tree<kCount / 2>(x) + tree<kCount / 2>(x + kCount / 2);
    }
  }
};

// As loops over memory these two become vector operations; unrolled, they would go lane by lane.
template <class T>
inline typename T::Bits largest_lane(Vec<typename T::Bits> v) {
  typename T::Bits lanes[kBytes / kSize<T>], largest = 0;
  store(lanes, v);
#pragma GCC unroll 1
  for (auto lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
}

template <class T>
inline int64_t sum_of_lanes(Vec<typename T::Bits> v) {
  typename T::Bits lanes[kBytes / kSize<T>];
  int64_t sum = 0;
  store(lanes, v);
#pragma GCC unroll 1
  for (auto lane : lanes) sum += lane;
  return sum;
}

template <class T, Norm N>
struct Lanes {
  using Sums = Vec<typename T::Sum>;
  using Ints = Vec<typename T::Bits>;
  static constexpr bool kSummed = N == Norm::kSum || N == Norm::kSquares;
  Sums sums[kSums] = {};
  Ints largest = {}, not_zero = {};
  Ints one = in_register(Ints{} + 1);  // GCC makes a comparison of the minimum with a known 1

  // kStep<T> elements. Magnitudes are compared as integers, whose order is that of the numbers and
  // puts infinity and NaN on top: one maximum finds the largest and tells whether all are finite.
  inline void add(const char* x) {
#pragma GCC unroll 8
    for (int k = 0; k < kSums; k += T::kWiden) {
      const Ints bits = load<Ints>(x + (k / T::kWiden) * kBytes);
      const Ints magnitude = bits & T::kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
      // A minimum where a comparison gives a mask that has to be turned into numbers.
      if constexpr (kBytes == 64) {
        not_zero += magnitude < one ? magnitude : one;
      } else {
        not_zero -= magnitude > 0;
      }
      if constexpr (kSummed) {
        Sums wide[T::kWiden] = {};
        T::widen(N == Norm::kSum ? magnitude : bits, wide);
        for (int w = 0; w < T::kWiden; ++w) sums[k + w] = add_power<N>(sums[k + w], wide[w]);
      }
    }
  }

  // n elements, kBlock<T> at most.
  inline void add(const char* x, int64_t n) {
    int64_t i = 0;
    for (; i + kStep<T> <= n; i += kStep<T>) add(x + i * kSize<T>);
    if (i == n) return;
    char tail[kStep<T> * kSize<T>] = {};
    std::memcpy(tail, x + i * kSize<T>, size_t((n - i) * kSize<T>));
    add(tail);
  }
};

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

// Whether float32 sums of a block, of whose elements that is the largest, leave their range.
template <class T>
inline bool leaves_range(typename T::Bits largest) {
  return largest != 0 && (largest < T::kLeastSafe || largest > T::kMostSafe);
}

template <class T, Norm N>
void measure_run(const char* x, int64_t n, Row& row) {
  using Bits = typename T::Bits;
  constexpr bool kSummed = Lanes<T, N>::kSummed;
  Totals<T> totals;
  Row all{};
  Bits most = 0;
  int64_t zeros = 0, finite = 0;  // elements of blocks without a NaN or an infinity
  for (int64_t i = 0; i < n; i += kBlock<T>) {
    const char* start = x + i * kSize<T>;
    const int64_t length = n - i < kBlock<T> ? n - i : kBlock<T>;
    Lanes<T, N> block;
    block.add(start, length);
    const Bits largest = largest_lane<T>(block.largest);
    const int64_t not_zero = sum_of_lanes<T>(block.not_zero);
    if (largest >= T::kNonFinite) {
      add_nonfinite<T, N>(start, length, length - not_zero, row);
      continue;
    }
    most = largest > most ? largest : most;
    zeros += length - not_zero;
    finite += length;
    if constexpr (kSummed && sizeof(typename T::Sum) == sizeof(float)) {
      if (leaves_range<T>(largest)) {
        all.power += wide_sum<T, N>(start, length);
        continue;
      }
    }
    if constexpr (kSummed) totals.add(block.sums, kSums);
  }
  all.max_abs = double(T::value(most));
  all.zero = double(zeros);
  if constexpr (kSummed) {
    all.power += totals.all();
  } else {
    all.power = power_of(all, double(finite), N);
  }
  combine(row, all, N);
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
  Totals<T> totals;
  if (i > 0) totals.add(sums, kSums);
  if (i < n) {
    for (; i + kPerVector <= n; i += kPerVector) add(load<Ints>(x + i * kSize<T>), rest);
    if (i < n) {
      const char* from = x + i * kSize<T>;
      char tail[kBytes] = {};
      if (end - from < kBytes)
        from = static_cast<const char*>(std::memcpy(tail, from, size_t((n - i) * kSize<T>)));
      add(load<Ints>(from) & last, rest);
    }
    totals.add(rest, T::kWiden);
  }
  const double sum = totals.all();
  if constexpr (sizeof(typename T::Sum) == sizeof(float)) {
    if (sum >= kSmallestSafeSum && sum <= DBL_MAX) return sum;
    for (int k = 0; k < kPerVector; ++k)
      if (seen[k] != 0) return wide_sum<T, Norm::kSquares>(x, n);
  }
  return sum;
}

template <class T>
void add_squares(const char* x, int64_t n, int64_t rows, double* powers) {
  constexpr int64_t kShort = 6;  // elements, up to which one after the other is faster
  if (n <= kShort) {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = row * n; i < (row + 1) * n; ++i) {
        const double v = T::value(load_bits<T>(x, i));
        powers[row] += v * v;
      }
    return;
  }
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
  // A NaN of no payload: see BFloat16::round.
  const auto c = coef == coef ? typename T::Sum(coef) : typename T::Sum(NAN);
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
