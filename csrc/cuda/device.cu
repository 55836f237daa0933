#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.h"

#ifndef FASTCLIP_CUDA_ON_CPU
#include <cuda_runtime.h>
#endif

namespace fastclip::cuda {
namespace {

// A list that the second-level cache holds beside its results and whatever else lies there.
constexpr int64_t kShareOfL2 = 2;
constexpr int kLargeArgumentsDriver = 12010;

std::atomic<int64_t> launched{0};

void check(int error, const char* what) {
  if (error == cudaSuccess) return;
  const char* text = cudaGetErrorString(static_cast<cudaError_t>(error));
  cudaGetLastError();  // the exception reports it: nobody else shall
  throw std::runtime_error(std::string("CUDA could not ") + what + ": " + text);
}

int attribute(cudaDeviceAttr which, int device) {
  int value;
  check(cudaDeviceGetAttribute(&value, which, device), "tell an attribute of the device");
  return value;
}

Limits find_limits(int device) {
  const int multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
  int driver, resident = 0;
  check(cudaDriverGetVersion(&driver), "tell the version of its driver");
  if (attribute(cudaDevAttrCooperativeLaunch, device) != 0)
    check(kernels_small()->resident(&resident), "tell how many blocks are resident at once");
  const bool large = kernels_large() && driver >= kLargeArgumentsDriver;
  Limits limits;
  limits.blocks = multiprocessors * kBlocksPerSm;
  limits.cooperative_blocks = multiprocessors * std::min(resident, kCooperativeBlocksPerSm);
  limits.cooperative_bytes = attribute(cudaDevAttrL2CacheSize, device) / kShareOfL2;
  limits.addresses = large ? kernels_large()->addresses : kernels_small()->addresses;
  return limits;
}

const Kernels& kernels_for(int addresses) {
  return addresses <= kernels_small()->addresses ? *kernels_small() : *kernels_large();
}

}  // namespace

void use_device(int device) { check(cudaSetDevice(device), "change the current device"); }

Limits limits_of(int device) {
#ifdef FASTCLIP_CUDA_ON_CPU
  return find_limits(device);  // tests change what the device is
#else
  static std::vector<Limits> known;  // guarded by the lock that every caller holds
  if (known.size() <= size_t(device)) known.resize(size_t(device) + 1, Limits{});
  Limits& limits = known[size_t(device)];
  if (limits.blocks == 0) limits = find_limits(device);
  return limits;
#endif
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status),
        "tell whether the stream is being captured");
  return status != cudaStreamCaptureStatusNone;
}

bool launch(const Launch& launch) {
  const bool few = launch.call.tables.addresses != nullptr;
  const int error = kernels_for(few ? 0 : launch.n_addresses).start(launch);
  if (launch.kernel == Kernel::kClip &&
      (error == cudaErrorCooperativeLaunchTooLarge || error == cudaErrorNotSupported)) {
    cudaGetLastError();  // or whoever asks for it next takes it for its own
    return false;
  }
  ++launched;
  check(error, "start a kernel");
  return true;
}

void store(uint64_t* target, const uint64_t* words, int64_t n, const Limits& limits, void* stream) {
  const Kernels& kernels = kernels_for(limits.addresses);
  while (n > 0) {
    const int now = int(std::min<int64_t>(n, kernels.words));
    ++launched;
    check(kernels.store(target, words, now, stream), "start a kernel");
    target += now;
    words += now;
    n -= now;
  }
}

int64_t launches() { return launched; }

}  // namespace fastclip::cuda
