// Half-precision numbers without hardware support, exact in every case; `internal` linkage because
// each SIMD level is compiled with other flags and the linker must never merge their functions.
#pragma once

#include <cstdint>
#include <cstring>

#include "portable.h"

namespace {

template <class To, class From>
FASTCLIP_HD inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

FASTCLIP_HD inline float bfloat16_to_float(uint16_t bits) {
  return bit_cast<float>(uint32_t(bits) << 16);
}

FASTCLIP_HD inline float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16;
  const uint32_t exponent = bits & 0x7c00;
  uint32_t out = uint32_t(bits & 0x7fff) << 13;
  if (exponent == 0x7c00) {
    out += uint32_t(255 - 31) << 23;
  } else if (exponent != 0) {
    out += uint32_t(127 - 15) << 23;
  } else {
    // A denormal half is mantissa * 2^-24; built from normal floats so that flush-to-zero cannot
    // lose it.
    const uint32_t one = uint32_t(127 - 14) << 23;
    out = bit_cast<uint32_t>(bit_cast<float>(out + one) - bit_cast<float>(one));
  }
  return bit_cast<float>(out | sign);
}

// Round to nearest, ties to even; NaN stays a (quiet) NaN.
FASTCLIP_HD inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if (x != x) return uint16_t((bits >> 16) | 0x0040);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

FASTCLIP_HD inline uint16_t float_to_half(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and above round to infinity
  if (magnitude < 0x38800000) {                                 // below 2^-14: a denormal half
    // Adding 0.5 leaves the rounded multiple of 2^-24 in the low bits of the sum.
    const float sum = bit_cast<float>(magnitude) + 0.5f;
    return uint16_t(sign | (bit_cast<uint32_t>(sum) - 0x3f000000));
  }
  const uint32_t rebiased = magnitude - (uint32_t(127 - 15) << 23);
  return uint16_t(sign | ((rebiased + 0xfff + ((rebiased >> 13) & 1)) >> 13));
}

}  // namespace
