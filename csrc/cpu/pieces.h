// The gradient list as the passes see it, and the passes over it. No torch header here or below:
// this is plain C++ that a test can drive without torch.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace fastclip::cpu {

// Dimensions of more than one element, outermost (largest stride) first, neighbours merged. Strides
// in elements, all positive. A dense tensor in any order of its dimensions has one dimension of
// stride 1.
struct Layout {
  static constexpr int kMaxDims = 8;  // after merging; what has more is refused
  int dims = 0;
  std::array<int64_t, kMaxDims> size{};
  std::array<int64_t, kMaxDims> stride{};

  bool dense() const { return dims == 0 || (dims == 1 && stride[0] == 1); }
};

// False if the tensor has more dimensions than a Layout holds, a stride of 0 (an expansion), or
// memory that is not known to be free of overlap.
bool make_layout(const int64_t* sizes, const int64_t* strides, int64_t dim, Layout& layout);

struct Piece {
  char* data;
  int64_t numel;
  Type type;
  int32_t layout;  // index into Pieces::layouts, -1 for dense memory
};

struct Pieces {
  std::vector<Piece> list;
  std::vector<Layout> layouts;
};

// Runs fn(ctx) on up to `workers` threads at once and returns when all have returned. Provided by
// whoever links this: the operators use torch's pool, so that torch.set_num_threads holds.
using Parallel = void (*)(int workers, void (*fn)(void*), void* ctx);

struct Threads {
  int count;
  Parallel run;
};

// Fills rows[0 .. pieces.list.size()). The same bits for every number of threads.
void measure(const Pieces& pieces, Norm norm, const Threads& threads, Row* rows);

// Multiplies piece i by coefs[i * stride]; a coefficient that is 1 in the type of the product
// writes nothing. Runs backwards through memory, to meet what measure() has left in the caches.
void scale(const Pieces& pieces, const double* coefs, int64_t stride, const Threads& threads);

}  // namespace fastclip::cpu
