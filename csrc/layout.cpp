#include <algorithm>

#include "pieces.h"

namespace fastclip {

bool make_layout(const int64_t* sizes, const int64_t* strides, int64_t dim, Layout& layout,
                 Order order) {
  struct Dim {
    int64_t size, stride, place;
  };
  std::vector<Dim> dims;
  for (int64_t i = 0; i < dim; ++i)
    if (sizes[i] != 1) dims.push_back({sizes[i], strides[i], i});
  std::sort(dims.begin(), dims.end(), [](Dim a, Dim b) { return a.stride > b.stride; });

  // From the innermost out: a dimension whose stride clears the extent of all inner ones cannot
  // overlap.
  int64_t extent = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    if (dims[i].stride < extent) return false;
    extent += (dims[i].size - 1) * dims[i].stride;
  }

  if (order == Order::kByUnit)
    std::stable_partition(dims.begin(), dims.end(), [](Dim d) { return d.place == 0; });

  layout = Layout{};
  for (const Dim& d : dims) {
    const int last = layout.dims - 1;
    if (last >= 0 && layout.stride[last] == d.size * d.stride) {
      layout.size[last] *= d.size;
      layout.stride[last] = d.stride;
      continue;
    }
    if (layout.dims == Layout::kMaxDims) return false;
    layout.size[layout.dims] = d.size;
    layout.stride[layout.dims++] = d.stride;
  }
  return true;
}

}  // namespace fastclip
