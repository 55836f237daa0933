#define FASTCLIP_VECTOR_BYTES 16
#define FASTCLIP_LEVEL "plain"
#include "kernels_impl.h"

const fastclip::cpu::Kernels* fastclip::cpu::kernels_plain() { return &kKernels; }
