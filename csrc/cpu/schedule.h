// What is cut where, and by whom it is run. Nothing here depends on the number of threads but who
// does the work.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "passes.h"

namespace fastclip::cpu {

constexpr int64_t kMinChunk = int64_t(1) << 16;  // elements; a multiple of every kernel's block
// Bounds the partial rows to 8192 * 40 bytes = 320 KiB however many elements there are.
constexpr int64_t kMaxChunks = 8192;
// What a thread takes at a time, and the least that is worth waking one for: 5 to 20 us of work,
// about what entering a parallel region costs.
constexpr int64_t kBatchBytes = int64_t(1) << 18;

// A run of consecutive chunks, given by its first.
struct Batch {
  int64_t piece;
  int64_t chunk;
};

struct Range {
  int64_t begin, n;
};

struct Schedule {
  int64_t chunk;               // elements
  std::vector<int64_t> first;  // of each piece: the number of chunks before it
  std::vector<Batch> batches;  // plus one past the last

  // With `units`, one per piece, a chunk is a part of one unit or some whole ones.
  explicit Schedule(const std::vector<Piece>& pieces, const Units* units = nullptr) {
    int64_t total = 0;
    for (const Piece& piece : pieces) total += piece.numel;
    chunk = std::max(kMinChunk, (total / kMaxChunks / kMinChunk + 1) * kMinChunk);
    first.reserve(pieces.size() + 1);
    first.push_back(0);
    int64_t open = kBatchBytes;  // bytes in the batch being filled
    for (size_t p = 0; p < pieces.size(); ++p) {
      const Units whole = units == nullptr ? Units{0, 1, pieces[p].numel} : units[p];
      const int64_t chunks = count_of(whole);
      const int64_t size = kTypeBytes[int(pieces[p].type)];
      for (int64_t c = 0; c < chunks; ++c) {
        if (open >= kBatchBytes) {
          batches.push_back({int64_t(p), c});
          open = 0;
        }
        open += range(whole, c).n * size;
      }
      first.push_back(first.back() + chunks);
    }
    batches.push_back({int64_t(pieces.size()), 0});
  }

  int64_t count_of(Units units) const {
    if (units.width == 0) return 0;
    if (units.width > chunk) return units.count * parts(units);
    const int64_t together = chunk / units.width;
    return (units.count + together - 1) / together;
  }

  // Chunks of each unit, where that is longer than one.
  int64_t parts(Units units) const { return (units.width + chunk - 1) / chunk; }

  Range range(Units units, int64_t c) const {
    if (units.width <= chunk) {
      const int64_t together = chunk / units.width * units.width;
      return {c * together, std::min(together, units.count * units.width - c * together)};
    }
    const int64_t n = parts(units), unit = c / n * units.width, begin = c % n * chunk;
    return {unit + begin, std::min(chunk, units.width - begin)};
  }

  int64_t chunks(int64_t piece) const { return first[piece + 1] - first[piece]; }
  int64_t count() const { return int64_t(batches.size()) - 1; }

  // Calls f(piece, chunk) for each chunk of a batch, backwards if asked to.
  template <class F>
  void run(int64_t batch, bool backwards, F&& f) const {
    const Batch begin = batches[batch], end = batches[batch + 1];
    const auto from = [&](int64_t p) { return p == begin.piece ? begin.chunk : 0; };
    const auto to = [&](int64_t p) { return p == end.piece ? end.chunk : chunks(p); };
    const int64_t last = std::min(end.piece, int64_t(first.size()) - 2);
    if (!backwards) {
      for (int64_t p = begin.piece; p <= last; ++p)
        for (int64_t c = from(p); c < to(p); ++c) f(p, c);
    } else {
      for (int64_t p = last; p >= begin.piece; --p)
        for (int64_t c = to(p) - 1; c >= from(p); --c) f(p, c);
    }
  }
};

// Denormals count while one of these lives. torch.set_flush_denormal() holds for the thread that
// calls it alone, so that what it flushed would depend on which thread takes which batch.
class KeepDenormals {
 public:
#if defined(__SSE2__)
  KeepDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlush); }
  ~KeepDenormals() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlush = (1u << 15) | (1u << 6);  // results and operands
  unsigned saved_;
#elif defined(__aarch64__)
  KeepDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ & ~(uint64_t(1) << 24)));
  }
  ~KeepDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  KeepDenormals() {}
#endif
};

// Threads take batches as they get free: one that is held up holds up no other. Which of them takes
// a batch has no influence on the result.
template <class F>
void for_all_chunks(const Schedule& schedule, const Threads& threads, bool backwards, F f) {
  struct Work {
    const Schedule& schedule;
    bool backwards;
    F& f;
    std::atomic<int64_t> next{0};
  } work{schedule, backwards, f};
  const auto take = [](void* ctx) {
    Work& w = *static_cast<Work*>(ctx);
    const int64_t count = w.schedule.count();
    const KeepDenormals keep;
    for (int64_t i; (i = w.next.fetch_add(1, std::memory_order_relaxed)) < count;)
      w.schedule.run(w.backwards ? count - 1 - i : i, w.backwards, w.f);
  };
  const int workers = int(std::min<int64_t>(threads.count, schedule.count()));
  if (workers > 1) {
    threads.run(workers, take, &work);
  } else {
    take(&work);
  }
}

}  // namespace fastclip::cpu
