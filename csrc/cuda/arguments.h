// What the host hands to the kernels. Tables that stay the same while a list does lie in device
// memory; addresses of gradients travel with the launch where there is room for them.
#pragma once

#include <cstdint>

#include "../pieces.h"
#include "../table.h"

namespace fastclip::cuda {

constexpr int kThreads = 256;  // of a block
constexpr int kVectorBytes = 16;
constexpr int kLoads = 4;  // vectors that a thread has on their way at once
// What a block reads at a time; tensors are cut into parts at multiples of it.
constexpr int kTileVectors = kThreads * kLoads;
constexpr int64_t kTileBytes = kTileVectors * kVectorBytes;

constexpr int64_t tile_elements(Type type) { return kTileBytes / kTypeBytes[int(type)]; }

// What one block does of one tensor. Only 32-bit fields: threads fetch a word each.
struct Part {
  uint32_t tile;   // where it begins, in tiles from the tensor's first element
  uint32_t n;      // elements
  int32_t row;     // of the table: the tensor's place in the list
  int32_t type;    // a Type
  int32_t layout;  // index into Tables::layouts, -1 for dense memory
  int32_t parts;   // of the same tensor; they follow each other
  int32_t slot;    // of this part and of the tensor's first, where there are more than one
  int32_t first_slot;
};
constexpr int kPartWords = sizeof(Part) / 4;
static_assert(kPartWords == 8, "a Part has no padding");

// A Layout for device code, in which std::array has no functions.
struct DeviceLayout {
  int64_t dims;
  int64_t size[Layout::kMaxDims];
  int64_t stride[Layout::kMaxDims];
};

struct Tables {
  const Part* parts;
  const int32_t* first_part;  // of each block, and one past the last
  const DeviceLayout* layouts;
  const uint64_t* addresses;  // of each part's tensor; null: they are among the arguments
  Row* slots;
  unsigned* arrived;  // [0] blocks, [1 + first_slot] parts of a tensor; 0 between launches
  double* factor;     // what the elements are to be multiplied by
};

struct Number {
  const double* pointer;  // on the device, or null:
  double value;
};

// One call, without the addresses.
struct Call {
  Tables tables;
  Row* table;
  void* total;  // float, or double if `wide`; null: nobody asks for what follows from the table
  double* coef;
  const double* factors;  // to multiply by: one for all, or one for each row
  Number max_norm;
  Number inv_scale;
  int32_t rows;
  Norm norm;
  bool wide;
  bool skip;            // leave everything if an element is not finite
  bool factor_per_row;  // of `factors`
};

// The kernels' only argument, with room for `kCapacity` addresses.
template <int kCapacity>
struct Arguments {
  Call call;
  uint64_t addresses[kCapacity];  // of each row's tensor
};

// 4 KiB of arguments everywhere; 32,764 bytes from CUDA 12.1 on. They need compute capability 7.0;
// so does __grid_constant__.
constexpr int kSmallBytes = 4096;
constexpr int kLargeBytes = 32764;
constexpr int capacity(int bytes) { return (bytes - int(sizeof(Call))) / 8; }

// Words to be written to device memory by a kernel: they are copied with the launch, so the host
// waits for nothing and may forget them, and a CUDA graph has its own copy.
template <int kCapacity>
struct Stored {
  uint64_t* target;
  int64_t n;
  uint64_t words[kCapacity];
};
constexpr int stored_words(int bytes) { return (bytes - 16) / 8; }

}  // namespace fastclip::cuda
