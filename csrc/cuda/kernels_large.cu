#include "launch.h"

#if !defined(CUDART_VERSION) || CUDART_VERSION >= 12010
#define FASTCLIP_ARGUMENT_BYTES fastclip::cuda::kLargeBytes
#include "kernels.cuh"

const fastclip::cuda::Kernels* fastclip::cuda::kernels_large() { return &kKernels; }
#else
const fastclip::cuda::Kernels* fastclip::cuda::kernels_large() { return nullptr; }
#endif
