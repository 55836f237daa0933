#include "inputs.h"

#include <torch/csrc/stable/tensor.h>

namespace fastclip {
namespace {

// The dispatcher's integer codes are those of the running torch, known only at run time.
int type_of(AtenTensorHandle tensor) {
  static const int32_t codes[kTypes] = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(),
                                        aoti_torch_dtype_float16(), aoti_torch_dtype_float64()};
  int32_t code;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &code));
  for (int i = 0; i < kTypes; ++i)
    if (codes[i] == code) return i;
  return -1;
}

bool is_strided_on(AtenTensorHandle tensor, const Accepted& accepted) {
  static const int32_t strided = aoti_torch_layout_strided();
  int32_t device, layout;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor, &layout));
  if (device != accepted.device_type || layout != strided) return false;
  if (accepted.device_index < 0) return true;
  int32_t index;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &index));
  return index == accepted.device_index;
}

char* data_of(AtenTensorHandle tensor, bool writable) {
  if (writable) {
    void* data;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(tensor, &data));
    return static_cast<char*>(data);
  }
  const void* data;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(tensor, &data));
  return const_cast<char*>(static_cast<const char*>(data));  // only ever read
}

bool layout_of(AtenTensorHandle tensor, Order order, Layout& layout) {
  int64_t dim, *sizes, *strides;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  return make_layout(sizes, strides, dim, layout, order);
}

Units units_of(AtenTensorHandle tensor, int64_t numel, int64_t first) {
  int64_t dim, *sizes;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  if (dim < 2) return {first, 1, numel};
  return {first, sizes[0], sizes[0] > 0 ? numel / sizes[0] : 0};
}

// False if the tensor is not served.
bool append(AtenTensorHandle tensor, bool writable, const Accepted& accepted, Order order,
            Pieces& pieces) {
  if (!is_strided_on(tensor, accepted)) return false;
  const int type = type_of(tensor);
  if (type < 0) return false;
  int64_t numel;
  bool contiguous;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(tensor, &numel));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(tensor, &contiguous));
  int32_t index = -1;
  if (!contiguous && numel > 0) {
    Layout layout;
    if (!layout_of(tensor, order, layout)) return false;
    if (!layout.dense()) {
      index = int32_t(pieces.layouts.size());
      pieces.layouts.push_back(layout);
    }
  }
  char* data = numel > 0 ? data_of(tensor, writable) : nullptr;
  if (!accepted.misaligned && reinterpret_cast<uintptr_t>(data) % uintptr_t(kTypeBytes[type]) != 0)
    return false;
  pieces.list.push_back({data, numel, Type(type), index});
  return true;
}

// The addresses seen so far, in a table at most half full.
class Addresses {
 public:
  explicit Addresses(int64_t n) {
    size_t size = 16;
    while (size < size_t(2 * n)) size *= 2;
    slots_.resize(size);
  }

  // False if it was there already.
  bool insert(const char* address) {
    size_t i = (reinterpret_cast<uintptr_t>(address) * 0x9e3779b97f4a7c15u) >> 32;
    for (;; ++i) {
      const char*& slot = slots_[i & (slots_.size() - 1)];
      if (slot == address) return false;
      if (slot != nullptr) continue;
      slot = address;
      return true;
    }
  }

 private:
  std::vector<const char*> slots_;
};

}  // namespace

TensorList::TensorList(StableIValue argument) {
  const auto list = torch::stable::detail::to<StableListHandle>(argument);
  size_t size;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
  handles_.resize(size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue element;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &element));
    handles_[i] = torch::stable::detail::to<AtenTensorHandle>(element);
  }
  torch_delete_list(list);
}

TensorList::~TensorList() {
  for (AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
}

Inputs collect(const TensorList& tensors, bool writable, const Accepted& accepted, Order order) {
  Inputs inputs;
  inputs.pieces.list.reserve(size_t(tensors.size()));
  int64_t first = 0;  // unit of the next tensor
  for (int64_t i = 0; i < tensors.size(); ++i) {
    if (!append(tensors[i], writable, accepted, order, inputs.pieces)) {
      inputs.refused = i;
      break;
    }
    if (order == Order::kByUnit) {
      inputs.units.push_back(units_of(tensors[i], inputs.pieces.list.back().numel, first));
      first += inputs.units.back().count;
    }
    inputs.wide |= inputs.pieces.list.back().type == Type::kDouble;
  }
  return inputs;
}

void refuse_repeated(Inputs& inputs) {
  const std::vector<Piece>& list = inputs.pieces.list;
  Addresses addresses(int64_t(list.size()));
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i].numel == 0 || addresses.insert(list[i].data)) continue;
    inputs.refused = int64_t(i);
    return;
  }
}

void mark_served(const TensorList& tensors, const Accepted& accepted, uint8_t* out) {
  Addresses addresses(tensors.size());
  Pieces pieces;
  for (int64_t i = 0; i < tensors.size(); ++i) {
    const bool ok = append(tensors[i], false, accepted, Order::kMemory, pieces);
    out[i] = ok && (pieces.list.back().numel == 0 || addresses.insert(pieces.list.back().data));
  }
}

}  // namespace fastclip
