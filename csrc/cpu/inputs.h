// From a Tensor[] argument to pieces.
#pragma once

#include <torch/csrc/stable/library.h>

#include "pieces.h"

namespace fastclip::cpu {

// Owns a Tensor[] argument of a boxed kernel. Works on handles: a stable::Tensor per element would
// cost a shared_ptr each, 60 ns of the 200 ns that an element costs then.
class TensorList {
 public:
  explicit TensorList(StableIValue argument);
  ~TensorList();
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;

  int64_t size() const { return size_; }

  // f(AtenTensorHandle) for element i; the handle is valid during the call.
  template <class F>
  auto with(int64_t i, F f) const;

 private:
  StableListHandle list_;
  int64_t size_;
};

struct Inputs {
  Pieces pieces;
  bool wide = false;     // some gradient is float64
  int64_t refused = -1;  // the first tensor that cannot be served, and then `pieces` ends before it
};

// A tensor is served if it is a strided CPU tensor of a dtype in Type, with memory free of overlap
// and at an address no earlier tensor of the list has.
Inputs collect(const TensorList& tensors, bool writable);

// The same test for every tensor, refused ones left out: out[i] is 1 for a served tensor, else 0.
void served(const TensorList& tensors, uint8_t* out);

}  // namespace fastclip::cpu
