"""The CUDA kernels on the host: csrc/cuda compiled as C++ with tests/cuda_on_cpu.h."""
