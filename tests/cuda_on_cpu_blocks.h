// How tests/cuda_on_cpu.h runs a grid: a block is a host thread, its CUDA threads are fibers of it.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_ON_CPU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_ON_CPU_ASAN 1
#endif
#endif
#ifdef CUDA_ON_CPU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

struct CudaOnCpuIndex {  // one dimension: a kernel that asks for .y does not compile
  unsigned x;
};
inline thread_local CudaOnCpuIndex threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

// Name and value at the start. With `seed` 0, blocks, warps and lanes run in order, else in random
// orders: with one host thread the same for the same seed. `next_error` is the cudaError_t that the
// next launch returns instead of running. The last four are counters.
#define CUDA_ON_CPU_CONTROLS(X)                                                           \
  X(seed, 0), X(host_threads, 2), X(devices, 1), X(sm_count, 4), X(blocks_per_sm, 2),     \
      X(cooperative, 1), X(l2_bytes, 50 << 20), X(compute_major, 9), X(compute_minor, 0), \
      X(driver_version, 13000), X(capturing, 0), X(next_error, 0), X(bytes_read, 0),      \
      X(bytes_written, 0), X(launches, 0), X(cooperative_launches, 0)

struct Runtime {
#define CUDA_ON_CPU_MEMBER(name, value) \
  name { value }
  std::atomic<long long> CUDA_ON_CPU_CONTROLS(CUDA_ON_CPU_MEMBER);
  std::mutex stacks_lock;
  std::vector<std::unique_ptr<char[]>> stacks;  // free ones, for the launches to come

  void reset_counters() { bytes_read = bytes_written = launches = cooperative_launches = 0; }
};

// Exported: one for the whole process, even with -fvisibility=hidden.
__attribute__((visibility("default"))) inline Runtime runtime;
inline thread_local uint64_t bytes_read, bytes_written;  // of this host thread's blocks

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  flockfile(stderr);  // another thread may fail too: one line it is
  std::fputs("cuda_on_cpu: ", stderr);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  std::fputs("\n", stderr);
  std::abort();
}

// A context is a stack pointer: there lie the registers that a call preserves, and where to return.
using Context = void*;
extern "C" void cuda_on_cpu_switch(Context* from, Context* to);
#ifdef __x86_64__
constexpr size_t FRAME = 64, RETURN = 48;
#define CUDA_ON_CPU_SWITCH                                                              \
  "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\nmov %rsp,(%rdi)\n" \
  "mov (%rsi),%rsp\npop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
#elif defined(__aarch64__)
constexpr size_t FRAME = 160, RETURN = 88;
#define CUDA_ON_CPU_SWITCH                                                                  \
  "stp x19,x20,[sp,-160]!\nstp x21,x22,[sp,16]\nstp x23,x24,[sp,32]\nstp x25,x26,[sp,48]\n" \
  "stp x27,x28,[sp,64]\nstp x29,x30,[sp,80]\nstp d8,d9,[sp,96]\nstp d10,d11,[sp,112]\n"     \
  "stp d12,d13,[sp,128]\nstp d14,d15,[sp,144]\nmov x9,sp\nstr x9,[x0]\nldr x9,[x1]\n"       \
  "mov sp,x9\nldp d14,d15,[sp,144]\nldp d12,d13,[sp,128]\nldp d10,d11,[sp,112]\n"           \
  "ldp d8,d9,[sp,96]\nldp x29,x30,[sp,80]\nldp x27,x28,[sp,64]\nldp x25,x26,[sp,48]\n"      \
  "ldp x23,x24,[sp,32]\nldp x21,x22,[sp,16]\nldp x19,x20,[sp],160\nret\n"
#else
#error "cuda_on_cpu.h switches fibers on x86-64 and aarch64 only"
#endif
asm(".pushsection .text.cuda_on_cpu_switch,\"axG\",%progbits,cuda_on_cpu_switch,comdat\n"
    ".weak cuda_on_cpu_switch\n.hidden cuda_on_cpu_switch\n.type cuda_on_cpu_switch,%function\n"
    "cuda_on_cpu_switch:\n" CUDA_ON_CPU_SWITCH
    ".size cuda_on_cpu_switch,.-cuda_on_cpu_switch\n.popsection\n");

constexpr size_t STACK = 256 << 10;  // for 32 KiB of parameters, passed on by value

inline Context new_context(char* stack, void (*entry)()) {
  char* frame = stack + STACK - FRAME;
  std::memset(frame, 0, FRAME);
  std::memcpy(frame + RETURN, &entry, sizeof entry);
  return frame;
}

#ifndef CUDA_ON_CPU_ASAN
inline void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
inline void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
inline void __asan_unpoison_memory_region(const void*, size_t) {}
#endif

struct Site {
  const char* file;
  int line;
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

enum class Scope { WARP, BLOCK, GRID, RETURNED };

struct Wait {
  Scope scope;
  const char* what;
  Site site;

  bool operator==(const Wait& other) const {
    const auto same = [](const char* a, const char* b) { return a == b || !strcmp(a, b); };
    return scope == other.scope && site.line == other.site.line && same(what, other.what) &&
           same(site.file, other.site.file);
  }
  std::string text() const {
    if (scope == Scope::RETURNED) return "returned";
    return std::string("at ") + what + " (" + site.file + ":" + std::to_string(site.line) + ")";
  }
};

// What the blocks of a launch share: the queue that they come from, and the barrier of the grid.
class Launch {
 public:
  const std::function<void()> kernel;
  const unsigned blocks, threads;
  const bool cooperative;
  const uint64_t seed = runtime.seed;

  Launch(std::function<void()> kernel, unsigned blocks, unsigned threads, bool cooperative)
      : kernel(std::move(kernel)), blocks(blocks), threads(threads), cooperative(cooperative) {
    for (unsigned i = 0; i < blocks; ++i) order_.push_back(i);
    if (seed != 0) std::shuffle(order_.begin(), order_.end(), std::mt19937_64(seed));
  }

  bool take_block(unsigned* index) {
    const unsigned i = next_++;
    if (i < blocks) *index = order_[i];
    return i < blocks;
  }

  // All threads of one block wait for the grid, or have returned.
  void arrive(const Wait& wait) {
    std::unique_lock<std::mutex> guard(lock_);
    if (arrived_ > 0 && !(wait == first_))
      fail("blocks wait at different barriers: %u %s, block %u %s", arrived_, first_.text().c_str(),
           blockIdx.x, wait.text().c_str());
    first_ = wait;
    ++arrived_;
    if (wait.scope == Scope::RETURNED) return;
    if (arrived_ == blocks) {
      arrived_ = 0;
      ++passed_;
      all_arrived_.notify_all();
    } else {
      all_arrived_.wait(guard, [this, before = passed_] { return passed_ != before; });
    }
  }

 private:
  std::vector<unsigned> order_;
  std::atomic<unsigned> next_{0};
  std::mutex lock_;
  std::condition_variable all_arrived_;
  unsigned arrived_ = 0, passed_ = 0;
  Wait first_{};
};

// The threads of one block at a time.
class Block {
 public:
  static inline thread_local Block* current = nullptr;

  explicit Block(Launch* launch)
      : launch_(launch), fibers_(launch->threads), warps_((launch->threads + 31) / 32) {
    std::lock_guard<std::mutex> guard(runtime.stacks_lock);
    std::vector<std::unique_ptr<char[]>>& stacks = runtime.stacks;
    while (stacks.size() < fibers_.size()) stacks.emplace_back(new char[STACK]);
    for (Fiber& fiber : fibers_) {
      fiber.stack = std::move(stacks.back());
      stacks.pop_back();
    }
    current = this;
  }

  ~Block() {
    std::lock_guard<std::mutex> guard(runtime.stacks_lock);
    for (Fiber& fiber : fibers_) runtime.stacks.push_back(std::move(fiber.stack));
  }

  void run(unsigned index) {
    blockIdx.x = index;
    random_.seed(launch_->seed ^ (uint64_t(index) << 32));
    for (Fiber& fiber : fibers_) {
      // The frames of the fiber that ended on it were left, not returned from.
      __asan_unpoison_memory_region(&fiber.stack[STACK - 4096], 4096);
      fiber.context = new_context(fiber.stack.get(), run_fiber);
      fiber.fake_stack = nullptr;
    }
    do {
      run_to_barrier();
      if (!agree(0, launch_->threads)) fail("%s", disagreement().c_str());
      voted_ = std::exchange(votes_, false);
      if (fibers_[0].wait.scope != Scope::BLOCK) launch_->arrive(fibers_[0].wait);
    } while (fibers_[0].wait.scope != Scope::RETURNED);
  }

  // These are called on a fiber, and come back when all those of the scope have called the same.
  void wait(Scope scope, const char* what, Site site) {
    Fiber& fiber = fibers_[threadIdx.x];
    fiber.wait = {scope, what, site};
    void** save = scope == Scope::RETURNED ? nullptr : &fiber.fake_stack;
    __sanitizer_start_switch_fiber(save, own_stack_, own_bytes_);
    cuda_on_cpu_switch(&fiber.context, &own_context_);
    __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
  }

  bool wait_and_vote(bool vote, const char* what, Site site) {
    votes_ |= vote;
    wait(Scope::BLOCK, what, site);
    return voted_;
  }

  void wait_for_grid(const char* what, Site site) {
    if (!launch_->cooperative)
      fail("%s (%s:%d) in a launch that is not cooperative", what, site.file, site.line);
    wait(Scope::GRID, what, site);
  }

  // Each lane of a warp gives a value and gets those of all 32.
  const uint64_t* exchange(unsigned mask, uint64_t value, const char* what, Site site) {
    if (mask != 0xffffffff && mask != (uint64_t(1) << lanes(threadIdx.x / 32)) - 1)
      fail("%s (%s:%d) for part of a warp: mask %#x", what, site.file, site.line, mask);
    Warp& warp = warps_[threadIdx.x / 32];
    warp.values[warp.arriving][threadIdx.x % 32] = value;
    wait(Scope::WARP, what, site);
    return warp.values[warp.arriving ^ 1];
  }

  unsigned lanes(unsigned warp) const { return std::min(32u, launch_->threads - 32 * warp); }

 private:
  struct Fiber {
    std::unique_ptr<char[]> stack;
    Context context;
    void* fake_stack;  // AddressSanitizer's
    Wait wait;
  };
  struct Warp {
    uint64_t values[2][32] = {};  // a lane gives its next value before others have read this one
    unsigned arriving = 0;
  };

  static void run_fiber() {
    __sanitizer_finish_switch_fiber(nullptr, &current->own_stack_, &current->own_bytes_);
    current->launch_->kernel();
    current->wait(Scope::RETURNED, "", {"", 0});
  }

  void resume(unsigned thread) {
    threadIdx.x = thread;
    __sanitizer_start_switch_fiber(&own_fake_stack_, fibers_[thread].stack.get(), STACK);
    cuda_on_cpu_switch(&own_context_, &fibers_[thread].context);
    __sanitizer_finish_switch_fiber(own_fake_stack_, nullptr, nullptr);
  }

  bool agree(unsigned first, unsigned count) const {
    for (unsigned i = first + 1; i < first + count; ++i)
      if (!(fibers_[i].wait == fibers_[first].wait)) return false;
    return true;
  }

  // Runs each lane of a warp to its next wait; whether they may all go on from there.
  bool step(unsigned warp) {
    const unsigned first = 32 * warp, count = lanes(warp);
    const uint64_t order = launch_->seed != 0 ? random_() : 0;
    const unsigned start = unsigned(order >> 32), stride = unsigned(order) | 1;  // odd: no repeats
    for (unsigned i = 0; i < 32; ++i) {
      const unsigned lane = (start + i * stride) % 32;
      if (lane < count) resume(first + lane);
    }
    if (fibers_[first].wait.scope != Scope::WARP || !agree(first, count)) return false;
    warps_[warp].arriving ^= 1;
    return true;
  }

  // One warp after another; with a seed, another may also go on where the lanes of one have met.
  void run_to_barrier() {
    std::vector<unsigned> running(warps_.size());
    std::iota(running.begin(), running.end(), 0);
    while (!running.empty()) {
      const size_t i = launch_->seed != 0 ? random_() % running.size() : 0;
      bool more = step(running[i]);
      while (more && !(launch_->seed != 0 && random_() % 8 == 0)) more = step(running[i]);
      if (!more) running.erase(running.begin() + i);
    }
  }

  std::string disagreement() const {
    std::string text = "threads of block " + std::to_string(blockIdx.x);
    text += " wait at different barriers:";
    for (unsigned first = 0, end = 0, runs = 0; first < launch_->threads; first = end) {
      if (runs++ == 8) return text + " ...";
      while (end < launch_->threads && fibers_[end].wait == fibers_[first].wait) ++end;
      text += " " + std::to_string(first);
      if (end - 1 > first) text += "-" + std::to_string(end - 1);
      text += " " + fibers_[first].wait.text() + (end < launch_->threads ? "," : "");
    }
    return text;
  }

  Launch* launch_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::mt19937_64 random_;
  Context own_context_{};  // the host thread's, as are the next three
  const void* own_stack_ = nullptr;
  size_t own_bytes_ = 0;
  void* own_fake_stack_ = nullptr;
  bool votes_ = false, voted_ = false;
};

inline void run_blocks(Launch* launch) {
  blockDim.x = launch->threads;
  gridDim.x = launch->blocks;
  Block block(launch);
  for (unsigned index; launch->take_block(&index);) block.run(index);
  runtime.bytes_read += bytes_read;
  runtime.bytes_written += bytes_written;
}

// Returns when all blocks have. Those of a cooperative launch need a host thread each.
inline void run(Launch* launch) {
  const unsigned hosts = std::clamp<long long>(runtime.host_threads, 1, launch->blocks);
  std::vector<std::thread> threads(launch->cooperative ? launch->blocks : hosts);
  for (std::thread& thread : threads) thread = std::thread(run_blocks, launch);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace cuda_on_cpu
