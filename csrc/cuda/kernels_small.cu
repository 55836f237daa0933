#define FASTCLIP_ARGUMENT_BYTES fastclip::cuda::kSmallBytes
#include "kernels.cuh"

const fastclip::cuda::Kernels* fastclip::cuda::kernels_small() { return &kKernels; }
