#include "kernels.h"

#ifdef __x86_64__
#define FASTCLIP_VECTOR_BYTES 32
#define FASTCLIP_LEVEL "avx2"
#include "kernels_impl.h"

const fastclip::cpu::Kernels* fastclip::cpu::kernels_avx2() { return &kKernels; }
#else
const fastclip::cpu::Kernels* fastclip::cpu::kernels_avx2() { return nullptr; }
#endif
