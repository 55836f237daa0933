// The statistics table: what one element does to a row, how two rows combine, and what follows from
// the whole table. One arithmetic for every kernel, on the CPU and on CUDA devices. `static`:
// kernels of several SIMD levels include this, and the linker must never merge their copies.
#pragma once

#include <cmath>
#include <cstdint>

#include "portable.h"

namespace fastclip {

// The norms whose powers the kernels accumulate; any other order is the reference's.
enum class Norm { kCount, kSum, kSquares, kMax };  // p = 0, 1, 2, inf

// One row. Value and Count may be narrower than doubles while few elements are in it.
template <class Value, class Count>
struct RowOf {
  double power;
  Value max_abs;  // of the finite elements
  Count nan;
  Count inf;
  Count zero;
};

// Laid out as the columns POWER, MAX_ABS, NAN, INF, ZERO. Counts are exact to 2^53.
using Row = RowOf<double, double>;

constexpr int64_t kColumns = sizeof(Row) / sizeof(double);
constexpr double kEps = 1e-6;  // added to the total norm, as torch.nn.utils does

// The larger of two magnitudes; a NaN on either side wins, which std::max and maxps would drop.
FASTCLIP_HD static inline double max_or_nan(double a, double b) { return b > a || b != b ? b : a; }

// What an element adds to the power, for the norms that are sums. V is a number or a vector of
// them, of any precision; magnitudes for kSum.
template <Norm N, class V>
FASTCLIP_HD static inline V add_power(V sum, V x) {
  static_assert(N == Norm::kSum || N == Norm::kSquares, "the other norms are no sums");
  return N == Norm::kSquares ? sum + x * x : sum + x;
}

template <class Value, class Count>
FASTCLIP_HD static inline void add_element(RowOf<Value, Count>& row, double x, Norm norm) {
  const double magnitude = std::fabs(x);
  switch (norm) {
    case Norm::kCount:
      row.power += x != 0;
      break;
    case Norm::kSum:
      row.power = add_power<Norm::kSum>(row.power, magnitude);
      break;
    case Norm::kSquares:
      row.power = add_power<Norm::kSquares>(row.power, x);
      break;
    case Norm::kMax:
      row.power = max_or_nan(row.power, magnitude);
      break;
  }
  row.nan += x != x;
  row.inf += magnitude == HUGE_VAL;
  row.zero += x == 0;
  if (magnitude > row.max_abs && magnitude < HUGE_VAL) row.max_abs = Value(magnitude);
}

// The power of n elements where it follows from the other columns, for the norms that are no sums.
// As kMax, also what a sum is that an element which is not finite has gone into.
FASTCLIP_HD static inline double power_of(const Row& row, double n, Norm norm) {
  if (norm == Norm::kCount) return n - row.zero;
  return row.nan > 0 ? NAN : row.inf > 0 ? HUGE_VAL : row.max_abs;
}

FASTCLIP_HD static inline double combine_power(double a, double b, Norm norm) {
  return norm == Norm::kMax ? max_or_nan(a, b) : a + b;
}

template <class Value, class Count>
FASTCLIP_HD static inline void combine(RowOf<Value, Count>& into, const RowOf<Value, Count>& other,
                                       Norm norm) {
  into.power = combine_power(into.power, other.power, norm);
  if (other.max_abs > into.max_abs) into.max_abs = other.max_abs;
  into.nan += other.nan;
  into.inf += other.inf;
  into.zero += other.zero;
}

// Statistics of x * inv_scale from those of x: no element needs to be multiplied for them.
FASTCLIP_HD static inline void unscale(Row& row, double inv_scale, Norm norm) {
  const double factor = std::fabs(inv_scale);
  row.max_abs *= factor;
  if (norm == Norm::kSum || norm == Norm::kMax) row.power *= factor;
  if (norm == Norm::kSquares) row.power *= factor * factor;
}

// Of the combined power of all rows.
FASTCLIP_HD static inline double total_norm(double power, Norm norm) {
  return norm == Norm::kSquares ? std::sqrt(power) : power;
}

// min(1, max_norm / (total + eps)); an infinite max_norm only measures; NaN stays NaN.
FASTCLIP_HD static inline double coefficient(double total, double max_norm) {
  if (max_norm == HUGE_VAL) return 1.0;
  const double coef = max_norm / (total + kEps);
  return coef > 1.0 ? 1.0 : coef;
}

struct Factors {
  double coef;
  double factor;  // of the elements: a loss scale is taken out too
};

// `leave`: nothing is to be written.
FASTCLIP_HD static inline Factors factors(double total, double max_norm, double inv_scale,
                                          bool leave) {
  const double coef = leave ? 1.0 : coefficient(total, max_norm);
  return {coef, leave ? 1.0 : coef * inv_scale};
}

}  // namespace fastclip
