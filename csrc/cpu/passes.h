// The passes over a gradient list.
#pragma once

#include <cstdint>

#include "../pieces.h"
#include "../table.h"

namespace fastclip::cpu {

// Runs fn(ctx) on up to `workers` threads at once and returns when all have returned. Provided by
// whoever links this: the operators use torch's pool, so that torch.set_num_threads holds.
using Parallel = void (*)(int workers, void (*fn)(void*), void* ctx);

struct Threads {
  int count;
  Parallel run;
};

// Fills rows[0 .. pieces.list.size()). The same bits for every number of threads.
void measure(const Pieces& pieces, Norm norm, const Threads& threads, Row* rows);

// The same, of elements numbered by unit, and the 2-norm of each unit: units[i] are those of piece
// i. The rows may differ from those of measure() by rounding; null if they are not asked for.
void measure_units(const Pieces& pieces, const Units* units, Norm norm, const Threads& threads,
                   Row* rows, double* unit_norms);

// Multiplies piece i by coefs[i * stride]; a coefficient that is 1 in the type of the product
// writes nothing. Runs backwards through memory, to meet what measure() has left in the caches.
void scale(const Pieces& pieces, const double* coefs, int64_t stride, const Threads& threads);

// Each unit by its own coefficient, otherwise as scale().
void scale_units(const Pieces& pieces, const Units* units, const double* coefs,
                 const Threads& threads);

}  // namespace fastclip::cpu
