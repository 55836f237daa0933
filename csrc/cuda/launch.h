// How the host starts kernels. Nothing here waits for the device.
#pragma once

#include "arguments.h"

namespace fastclip::cuda {

// Four blocks to a multiprocessor leave 64 registers to a thread. The cooperative kernel, whose
// blocks must all be resident, is content with two.
constexpr int kBlocksPerSm = 4;
constexpr int kCooperativeBlocksPerSm = 2;

enum class Kernel { kMeasure, kScale, kClip };  // kClip: both passes in one cooperative launch

struct Launch {
  Kernel kernel;
  int blocks;
  const Call& call;
  const uint64_t* addresses;  // of the rows; not used where the device has them
  int n_addresses;
  void* stream;
};

// The kernels of one size of arguments. They return a cudaError_t.
struct Kernels {
  int addresses;  // that fit
  int words;      // that fit into one store
  int (*start)(const Launch& launch);
  int (*store)(uint64_t* target, const uint64_t* words, int n, void* stream);
  int (*resident)(int* blocks);  // of the cooperative kernel, on a multiprocessor
};

const Kernels* kernels_small();
const Kernels* kernels_large();  // null if the compiler knows no such arguments

}  // namespace fastclip::cuda
