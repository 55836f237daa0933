// Strided memory, a buffer at a time: the kernels only know contiguous runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../pieces.h"

namespace fastclip::cpu {

constexpr int64_t kBufferElements = 4096;  // 32 KiB of doubles: stays in the first-level cache

// Calls f(offset, stride, n) for the runs along the innermost dimension that make up the n elements
// from logical element `begin` on; offset in elements from the tensor's first.
template <class F>
void for_runs(const Layout& layout, int64_t begin, int64_t n, F f) {
  const int inner = layout.dims - 1;
  std::array<int64_t, Layout::kMaxDims> index{};
  int64_t rest = begin;
  for (int d = inner; d >= 0; --d) {
    index[d] = rest % layout.size[d];
    rest /= layout.size[d];
  }
  while (n > 0) {
    int64_t offset = 0;
    for (int d = 0; d <= inner; ++d) offset += index[d] * layout.stride[d];
    const int64_t run = std::min(n, layout.size[inner] - index[inner]);
    f(offset, layout.stride[inner], run);
    n -= run;
    index[inner] = 0;
    for (int d = inner - 1; d >= 0 && ++index[d] == layout.size[d]; --d) index[d] = 0;
  }
}

template <int64_t kSize>
void gather(const char* data, const Layout& layout, int64_t begin, int64_t n, char* buffer) {
  for_runs(layout, begin, n, [&](int64_t offset, int64_t stride, int64_t run) {
    const char* from = data + offset * kSize;
    for (int64_t i = 0; i < run; ++i, buffer += kSize)
      std::memcpy(buffer, from + i * stride * kSize, kSize);
  });
}

template <int64_t kSize>
void scatter(char* data, const Layout& layout, int64_t begin, int64_t n, const char* buffer) {
  for_runs(layout, begin, n, [&](int64_t offset, int64_t stride, int64_t run) {
    char* to = data + offset * kSize;
    for (int64_t i = 0; i < run; ++i, buffer += kSize)
      std::memcpy(to + i * stride * kSize, buffer, kSize);
  });
}

using Gather = void (*)(const char*, const Layout&, int64_t, int64_t, char*);
using Scatter = void (*)(char*, const Layout&, int64_t, int64_t, const char*);
constexpr Gather kGather[kTypes] = {gather<4>, gather<2>, gather<2>, gather<8>};
constexpr Scatter kScatter[kTypes] = {scatter<4>, scatter<2>, scatter<2>, scatter<8>};

}  // namespace fastclip::cpu
