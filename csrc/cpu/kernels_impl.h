// The kernels, written once on GCC/Clang vector types and compiled once per SIMD level with that
// level's flags. The including file defines FASTCLIP_VECTOR_BYTES and FASTCLIP_LEVEL. Everything
// here has internal linkage, and no standard template is used: the linker must never pick another
// level's copy of it.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../half.h"
#include "kernels.h"

namespace fastclip::cpu {
namespace {

constexpr int kBytes = FASTCLIP_VECTOR_BYTES;

template <class E>
struct VecOf {
  typedef E type __attribute__((vector_size(kBytes)));
};
template <class E>
using Vec = typename VecOf<E>::type;
using Floats = Vec<float>;
using Doubles = Vec<double>;

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
template <class V, class W>
inline V as(W w) {
  return (V)w;  // a cast between vector types of one size keeps the bits
}

// Per dtype: the integer of its width, the bits of a magnitude, the smallest non-finite one, the
// type sums are kept in, and how one vector of it becomes kWiden vectors of that type and back.
struct Float {
  using Bits = int32_t;
  using Sum = float;
  static constexpr int kWiden = 1;
  static constexpr Bits kMagnitude = 0x7fffffff;
  static constexpr Bits kNonFinite = 0x7f800000;
  static inline void widen(Vec<Bits> v, Floats* out) { out[0] = as<Floats>(v); }
  static inline Vec<Bits> narrow(const Floats* in) { return as<Vec<Bits>>(in[0]); }
  static inline float value(Bits b) { return bit_cast<float>(b); }
  static inline Bits bits(float x) { return bit_cast<Bits>(x); }
};

struct BFloat16 {
  using Bits = int16_t;
  using Sum = float;
  static constexpr int kWiden = 2;
  static constexpr Bits kMagnitude = 0x7fff;
  static constexpr Bits kNonFinite = 0x7f80;
  static constexpr uint32_t kHigh = 0xffff0000u;
  // Even and odd elements apart: one shift and one mask, no shuffle. Little-endian.
  static inline void widen(Vec<Bits> v, Floats* out) {
    out[0] = as<Floats>(as<Vec<uint32_t>>(v) << 16);
    out[1] = as<Floats>(as<Vec<uint32_t>>(v) & kHigh);
  }
  static inline Vec<uint32_t> round(Floats x) {
    const auto bits = as<Vec<uint32_t>>(x);
    const auto nan = as<Vec<uint32_t>>(x != x);
    const auto rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (rounded & ~nan) | ((bits | 0x00400000) & nan);
  }
  static inline Vec<Bits> narrow(const Floats* in) {
    return as<Vec<Bits>>((round(in[0]) >> 16) | (round(in[1]) & kHigh));
  }
  static inline float value(Bits b) { return bfloat16_to_float(uint16_t(b)); }
  static inline Bits bits(float x) { return Bits(float_to_bfloat16(x)); }
};

struct Half {
  using Bits = int16_t;
  using Sum = float;
  static constexpr int kWiden = 2;
  static constexpr Bits kMagnitude = 0x7fff;
  static constexpr Bits kNonFinite = 0x7c00;
#if FASTCLIP_VECTOR_BYTES == 64
  static inline void widen(Vec<Bits> v, Floats* out) {
    out[0] = as<Floats>(_mm512_cvtph_ps(_mm512_castsi512_si256(as<__m512i>(v))));
    out[1] = as<Floats>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(as<__m512i>(v), 1)));
  }
  static inline Vec<Bits> narrow(const Floats* in) {
    const __m256i low = _mm512_cvtps_ph(as<__m512>(in[0]), _MM_FROUND_TO_NEAREST_INT);
    const __m256i high = _mm512_cvtps_ph(as<__m512>(in[1]), _MM_FROUND_TO_NEAREST_INT);
    return as<Vec<Bits>>(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
#elif defined(__F16C__)
  static inline void widen(Vec<Bits> v, Floats* out) {
    out[0] = as<Floats>(_mm256_cvtph_ps(_mm256_castsi256_si128(as<__m256i>(v))));
    out[1] = as<Floats>(_mm256_cvtph_ps(_mm256_extracti128_si256(as<__m256i>(v), 1)));
  }
  static inline Vec<Bits> narrow(const Floats* in) {
    const __m128i low = _mm256_cvtps_ph(as<__m256>(in[0]), _MM_FROUND_TO_NEAREST_INT);
    const __m128i high = _mm256_cvtps_ph(as<__m256>(in[1]), _MM_FROUND_TO_NEAREST_INT);
    return as<Vec<Bits>>(_mm256_set_m128i(high, low));
  }
#elif defined(__aarch64__)
  static inline void widen(Vec<Bits> v, Floats* out) {
    const auto halves = as<float16x8_t>(v);
    out[0] = as<Floats>(vcvt_f32_f16(vget_low_f16(halves)));
    out[1] = as<Floats>(vcvt_high_f32_f16(halves));
  }
  static inline Vec<Bits> narrow(const Floats* in) {
    const float16x4_t low = vcvt_f16_f32(as<float32x4_t>(in[0]));
    return as<Vec<Bits>>(vcvt_high_f16_f32(low, as<float32x4_t>(in[1])));
  }
#else
  static constexpr int kPerVector = kBytes / int(sizeof(Bits));
  static constexpr int kPerSum = kBytes / int(sizeof(Sum));
  static inline void widen(Vec<Bits> v, Floats* out) {
    for (int i = 0; i < kPerVector; ++i)
      out[i / kPerSum][i % kPerSum] = half_to_float(uint16_t(v[i]));
  }
  static inline Vec<Bits> narrow(const Floats* in) {
    Vec<Bits> v{};
    for (int i = 0; i < kPerVector; ++i) v[i] = Bits(float_to_half(in[i / kPerSum][i % kPerSum]));
    return v;
  }
#endif
  static inline float value(Bits b) { return half_to_float(uint16_t(b)); }
  static inline Bits bits(float x) { return Bits(float_to_half(x)); }
};

struct Double {
  using Bits = int64_t;
  using Sum = double;
  static constexpr int kWiden = 1;
  static constexpr Bits kMagnitude = 0x7fffffffffffffff;
  static constexpr Bits kNonFinite = 0x7ff0000000000000;
  static inline void widen(Vec<Bits> v, Doubles* out) { out[0] = as<Doubles>(v); }
  static inline Vec<Bits> narrow(const Doubles* in) { return as<Vec<Bits>>(in[0]); }
  static inline double value(Bits b) { return bit_cast<double>(b); }
  static inline Bits bits(double x) { return bit_cast<Bits>(x); }
};

template <class T>
constexpr int64_t kSize = int64_t(sizeof(typename T::Bits));

template <class T>
inline typename T::Bits load_bits(const char* x, int64_t i) {
  typename T::Bits bits;
  std::memcpy(&bits, x + i * kSize<T>, sizeof bits);
  return bits;
}

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
    constexpr int kLanes = kBytes / int(sizeof(typename T::Sum));
    Block<T> block{0, 0, 0};
    for (int i = 0; i < kInts; ++i) {
      block.largest = largest[i] > block.largest ? largest[i] : block.largest;
      block.zeros += zeros[i];
    }
    if constexpr (N == Norm::kSum || N == Norm::kSquares) {
      double lanes[kLanes] = {};
      for (int k = 0; k < kSums; ++k)
        for (int i = 0; i < kLanes; ++i) lanes[i] += double(sums[k][i]);
      for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
      block.sum = lanes[0];
    }
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
    {scale<Float>, scale<BFloat16>, scale<Half>, scale<Double>},
};

}  // namespace
}  // namespace fastclip::cpu
