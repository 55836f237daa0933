// Vectors of each dtype, for one SIMD level: FASTCLIP_VECTOR_BYTES is defined by who includes this.
// Everything has internal linkage, as in kernels_impl.h.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../half.h"

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

// The same value, of which the compiler knows nothing but that it is in a register.
template <class V>
inline V in_register(V v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

// GCC would load a vector that is used as integers and as floats once for each.
template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return in_register(v);
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
// Where sums are float32: if the largest of 2048 magnitudes lies between kLeastSafe and kMostSafe
// (2^-45 and 2^58), neither their sum nor that of their squares leaves [2^-90, 2^127].
struct Float {
  using Bits = int32_t;
  using Sum = float;
  static constexpr int kWiden = 1;
  static constexpr Bits kMagnitude = 0x7fffffff;
  static constexpr Bits kNonFinite = 0x7f800000;
  static constexpr Bits kLeastSafe = (127 - 45) << 23, kMostSafe = (127 + 58) << 23;
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
  static constexpr Bits kLeastSafe = (127 - 45) << 7, kMostSafe = (127 + 58) << 7;
  static constexpr uint32_t kHigh = 0xffff0000u;
  // Even and odd elements apart: one shift and one mask, no shuffle. Little-endian.
  static inline void widen(Vec<Bits> v, Floats* out) {
    out[0] = as<Floats>(as<Vec<uint32_t>>(v) << 16);
    out[1] = as<Floats>(as<Vec<uint32_t>>(v) & kHigh);
  }
  // A NaN needs no care while its low half is 0, as that of a product of widened numbers is: what
  // is added then does not reach the high half.
  static inline Vec<uint32_t> round(Floats x) {
    const auto bits = as<Vec<uint32_t>>(x);
    return bits + 0x7fff + ((bits >> 16) & 1);
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
  static constexpr Bits kLeastSafe = 1, kMostSafe = kNonFinite - 1;  // all of them
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

}  // namespace
}  // namespace fastclip::cpu
