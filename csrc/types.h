// The dtypes the kernels know.
#pragma once

#include <cstdint>

namespace fastclip {

enum class Type : int32_t { kFloat, kBFloat16, kHalf, kDouble };
constexpr int kTypes = 4;
constexpr int64_t kTypeBytes[kTypes] = {4, 2, 2, 8};

}  // namespace fastclip
