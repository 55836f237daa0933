#include "kernels.h"

#ifdef __x86_64__
#define FASTCLIP_VECTOR_BYTES 64
#define FASTCLIP_LEVEL "avx512"
#include "kernels_impl.h"

const fastclip::cpu::Kernels* fastclip::cpu::kernels_avx512() { return &kKernels; }
#else
const fastclip::cpu::Kernels* fastclip::cpu::kernels_avx512() { return nullptr; }
#endif
