// From a Tensor[] argument to pieces.
#pragma once

#include <torch/csrc/stable/library.h>

#include <vector>

#include "pieces.h"

namespace fastclip {

// Owns a Tensor[] argument of a boxed kernel. Works on handles: a stable::Tensor per element would
// cost a shared_ptr each, 60 ns of the 200 ns that an element costs then.
class TensorList {
 public:
  explicit TensorList(StableIValue argument);
  ~TensorList();
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;

  int64_t size() const { return int64_t(handles_.size()); }
  AtenTensorHandle operator[](int64_t i) const { return handles_[size_t(i)]; }

 private:
  std::vector<AtenTensorHandle> handles_;  // whoever takes them out of the list has to delete them
};

// What the kernels of a device take, beside strided tensors of a dtype in Type with memory free of
// overlap.
struct Accepted {
  int32_t device_type;
  int32_t device_index;  // -1: any
  bool misaligned;       // addresses that are no multiple of the element's size
};

struct Inputs {
  Pieces pieces;
  std::vector<Units> units;  // of each piece, if asked for
  bool wide = false;         // some gradient is float64
  int64_t refused = -1;      // the first tensor that cannot be served
};

// Stops at the first tensor that cannot be served for what it is.
Inputs collect(const TensorList& tensors, bool writable, const Accepted& accepted,
               Order order = Order::kMemory);

// Refuses a tensor at an address that an earlier one has too.
void refuse_repeated(Inputs& inputs);

// The same tests for every tensor, refused ones left out: out[i] is 1 for a served tensor, else 0.
void mark_served(const TensorList& tensors, const Accepted& accepted, uint8_t* out);

}  // namespace fastclip
