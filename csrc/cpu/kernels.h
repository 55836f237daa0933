// Contiguous runs of one dtype: what a SIMD level must provide, and the choice between levels.
#pragma once

#include <cstdint>

#include "../table.h"
#include "../types.h"

namespace fastclip::cpu {

// No pointer needs any alignment. measure() adds n elements to the row; add_squares() adds the sum
// of squares of each of `rows` rows of n elements, one after the other, to its power; scale()
// multiplies n elements by coef in float (double for kDouble) and rounds once.
struct Kernels {
  const char* name;
  void (*measure[kTypes])(const char* x, int64_t n, Norm norm, Row& row);
  void (*add_squares[kTypes])(const char* x, int64_t n, int64_t rows, double* powers);
  void (*scale[kTypes])(char* x, int64_t n, double coef);
};

// A level this library or this CPU lacks is null.
const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_plain();

const Kernels& kernels();  // the level in use: the best this CPU has, until chosen otherwise
bool choose_kernels(const char* name);  // false if there is no such level here

}  // namespace fastclip::cpu
