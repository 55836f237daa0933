// The gradient list as the passes of every device see it. No torch header here: this is plain C++
// that a test can drive without torch.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "types.h"

namespace fastclip {

// Dimensions of more than one element, outermost first, neighbours merged. Strides in elements, all
// positive.
struct Layout {
  static constexpr int kMaxDims = 8;  // after merging; what has more is refused
  int dims = 0;
  std::array<int64_t, kMaxDims> size{};
  std::array<int64_t, kMaxDims> stride{};

  bool dense() const { return dims == 0 || (dims == 1 && stride[0] == 1); }
};

// The order in which elements are numbered. A unit is a slice along a tensor's first dimension, or
// all of a tensor of fewer than two.
enum class Order {
  kMemory,  // the largest stride outermost: a dense tensor in any order has one dimension of stride
            // 1
  kByUnit,  // one unit after the other, each in the order of memory
};

// False if the tensor has more dimensions than a Layout holds, a stride of 0 (an expansion), or
// memory that is not known to be free of overlap.
bool make_layout(const int64_t* sizes, const int64_t* strides, int64_t dim, Layout& layout,
                 Order order = Order::kMemory);

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

// Of each piece, whose elements are numbered by unit.
struct Units {
  int64_t first;  // in the whole list
  int64_t count;
  int64_t width;  // elements of each
};

}  // namespace fastclip
