// Elements as the kernels see them: 16 bytes of one dtype as numbers and back, and where the
// elements of a part lie.
#pragma once

#include "../half.h"
#include "arguments.h"

#ifndef FASTCLIP_CUDA_ON_CPU
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace fastclip::cuda {

using Vector = uint4;
static_assert(sizeof(Vector) == kVectorBytes, "the widest load there is");

__device__ inline uint32_t word(const Vector& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Per dtype: the type of products and short sums, how many lie in a vector, and element i of one;
// indices are known to the compiler wherever these are called.
struct Float {
  using Product = float;
  using Bits = uint32_t;
  static constexpr int kPerVector = 4;
  __device__ static float value(Bits bits) { return bit_cast<float>(bits); }
  __device__ static Bits bits(float x) { return bit_cast<Bits>(x); }
  __device__ static float get(const Vector& v, int i) { return value(word(v, i)); }
};

// Two elements to a word, the first in its lower half.
template <class T>
struct Halves {
  using Product = float;
  using Bits = uint16_t;
  static constexpr int kPerVector = 8;
  __device__ static float get(const Vector& v, int i) {
    return T::value(Bits(i % 2 ? word(v, i / 2) >> 16 : word(v, i / 2) & 0xffff));
  }
};

struct BFloat16 : Halves<BFloat16> {
  __device__ static float value(Bits bits) { return bfloat16_to_float(bits); }
  __device__ static Bits bits(float x) { return bit_cast<Bits>(__float2bfloat16_rn(x)); }
};

struct Half : Halves<Half> {
  __device__ static float value(Bits bits) { return __half2float(bit_cast<__half>(bits)); }
  __device__ static Bits bits(float x) { return bit_cast<Bits>(__float2half_rn(x)); }
};

struct Double {
  using Product = double;
  using Bits = uint64_t;
  static constexpr int kPerVector = 2;
  __device__ static double value(Bits bits) { return bit_cast<double>(bits); }
  __device__ static Bits bits(double x) { return bit_cast<Bits>(x); }
  __device__ static double get(const Vector& v, int i) {
    return value(uint64_t(word(v, 2 * i + 1)) << 32 | word(v, 2 * i));
  }
};

template <class T>
__device__ inline Vector scaled(const Vector& v, typename T::Product factor) {
  uint32_t words[4];
  if constexpr (T::kPerVector == 2) {
    for (int i = 0; i < 2; ++i) {
      const uint64_t bits = T::bits(T::get(v, i) * factor);
      words[2 * i] = uint32_t(bits);
      words[2 * i + 1] = uint32_t(bits >> 32);
    }
  } else {
    constexpr int kPerWord = T::kPerVector / 4;
    for (int i = 0; i < 4; ++i) {
      words[i] = T::bits(T::get(v, kPerWord * i) * factor);
      if (kPerWord == 2) words[i] |= uint32_t(T::bits(T::get(v, 2 * i + 1) * factor)) << 16;
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// How memory is read. Through the read-only path, unless the same kernel writes it.
struct ReadOnly {
  template <class V>
  __device__ static V load(const V* p) {
    return __ldg(p);
  }
};
struct Written {
  template <class V>
  __device__ static V load(const V* p) {
    return __ldcg(p);
  }
};

// A part of dense memory: vectors, and at each end fewer elements than one.
template <class T>
struct Span {
  using Bits = typename T::Bits;

  Bits* data;  // its first element
  uint32_t n;
  uint32_t head;     // elements before the first vector
  uint32_t vectors;  // from data + head on

  __device__ Span(uint64_t address, const Part& part)
      : data(reinterpret_cast<Bits*>(address) +
             part.tile * int64_t(kTileBytes / sizeof(typename T::Bits))),
        n(part.n) {
    const auto low = unsigned(reinterpret_cast<uintptr_t>(data));
    head = (-low % kVectorBytes) / sizeof(Bits);
    head = head < n ? head : n;
    vectors = (n - head) / T::kPerVector;
  }

  __device__ Vector* vector(uint32_t i) const { return reinterpret_cast<Vector*>(data + head) + i; }
  // The elements outside of vectors, as many as there are.
  __device__ uint32_t edges() const { return n - vectors * T::kPerVector; }
  __device__ Bits* edge(uint32_t i) const {
    return data + (i < head ? i : i + vectors * T::kPerVector);
  }
};

// Element i of a strided tensor, counted along memory, in elements from its first.
__device__ inline int64_t strided_offset(const DeviceLayout* layout, uint64_t i) {
  int64_t offset = 0;
#pragma unroll 1  // for fewer registers
  for (int dim = int(__ldg(&layout->dims)) - 1; dim > 0; --dim) {
    const uint64_t size = uint64_t(__ldg(&layout->size[dim])), outer = i / size;
    offset += int64_t(i - outer * size) * __ldg(&layout->stride[dim]);
    i = outer;
  }
  return offset + int64_t(i) * __ldg(&layout->stride[0]);
}

template <class T>
__device__ inline typename T::Bits* strided_element(uint64_t address, const Part& part,
                                                    const DeviceLayout* layouts, uint32_t i) {
  const uint64_t place = part.tile * int64_t(kTileBytes / sizeof(typename T::Bits)) + i;
  return reinterpret_cast<typename T::Bits*>(address) +
         strided_offset(layouts + part.layout, place);
}

}  // namespace fastclip::cuda
