// What the operators of every device have in common.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>

#include "table.h"

namespace fastclip {

using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

inline Norm norm_of(double p) {
  if (p == 2) return Norm::kSquares;
  if (p == 1) return Norm::kSum;
  if (p == 0) return Norm::kCount;
  STD_TORCH_CHECK(p == HUGE_VAL, "the kernels know the norm orders 0, 1, 2 and inf, got ", p);
  return Norm::kMax;
}

struct Place {
  int32_t device_type;
  int32_t device_index;
};

inline Place on_cpu() { return {aoti_torch_device_type_cpu(), 0}; }

// Of at most two dimensions, contiguous.
inline Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, Place place = on_cpu()) {
  const int64_t strides[2] = {sizes.size() == 2 ? sizes.begin()[1] : 1, 1};
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.begin(),
                                                         strides, dtype, place.device_type,
                                                         place.device_index, &handle));
  return Tensor(handle);
}

inline Tensor empty_table(int64_t rows, Place place = on_cpu()) {
  return empty({rows, kColumns}, aoti_torch_dtype_float64(), place);
}

inline Tensor empty_scalar(bool wide, Place place = on_cpu()) {
  return empty({}, wide ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32(), place);
}

// On the CPU.
inline Tensor scalar(double value, bool wide) {
  Tensor out = empty_scalar(wide);
  if (wide) {
    *static_cast<double*>(out.mutable_data_ptr()) = value;
  } else {
    *static_cast<float*>(out.mutable_data_ptr()) = float(value);
  }
  return out;
}

inline bool is_contiguous_double(const Tensor& values) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(values.get(), &dtype));
  return dtype == aoti_torch_dtype_float64() && values.is_contiguous();
}

}  // namespace fastclip
