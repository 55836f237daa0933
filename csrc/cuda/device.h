// The device as the host sees it. Errors are std::runtime_error; nothing here waits for the device.
#pragma once

#include "launch.h"
#include "plan.h"

namespace fastclip::cuda {

// Makes a device the current one of this thread, for the CUDA runtime linked into this library.
void use_device(int device);

// Of the current device, which is given by its number.
Limits limits_of(int device);

bool is_capturing(void* stream);

// Whether it was started: false, of a cooperative kernel alone, where the stream has too few
// multiprocessors for all of its blocks at once, as one of a green context may.
bool launch(const Launch& launch);
void store(uint64_t* target, const uint64_t* words, int64_t n, const Limits& limits, void* stream);

int64_t launches();  // so far, by this process

}  // namespace fastclip::cuda
