// Marks functions that are compiled for the host and for CUDA devices.
#pragma once

#ifdef __CUDACC__
#define FASTCLIP_HD __host__ __device__
#else
#define FASTCLIP_HD
#endif
