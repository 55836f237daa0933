// The statistics table: what one element does to a row, how two rows combine, and what follows from
// the whole table. One arithmetic for every kernel. `static`: kernels of several SIMD levels
// include this, and the linker must never merge their copies.
#pragma once

#include <cmath>
#include <cstdint>

namespace fastclip {

// The norms whose powers the kernels accumulate; any other order is the reference's.
enum class Norm { kCount, kSum, kSquares, kMax };  // p = 0, 1, 2, inf

// One row, laid out as the columns POWER, MAX_ABS, NAN, INF, ZERO. Counts are doubles, exact to
// 2^53.
struct Row {
  double power = 0;
  double max_abs = 0;
  double nan = 0;
  double inf = 0;
  double zero = 0;
};

constexpr int64_t kColumns = sizeof(Row) / sizeof(double);
constexpr double kEps = 1e-6;  // added to the total norm, as torch.nn.utils does

// The larger of two magnitudes; a NaN on either side wins, which std::max and maxps would drop.
static inline double max_or_nan(double a, double b) { return b > a || b != b ? b : a; }

static inline void add_element(Row& row, double x, Norm norm) {
  const double magnitude = std::fabs(x);
  switch (norm) {
    case Norm::kCount:
      row.power += x != 0;
      break;
    case Norm::kSum:
      row.power += magnitude;
      break;
    case Norm::kSquares:
      row.power += x * x;
      break;
    case Norm::kMax:
      row.power = max_or_nan(row.power, magnitude);
      break;
  }
  row.nan += x != x;
  row.inf += magnitude == HUGE_VAL;
  row.zero += x == 0;
  if (magnitude > row.max_abs && magnitude < HUGE_VAL) row.max_abs = magnitude;
}

static inline double combine_power(double a, double b, Norm norm) {
  return norm == Norm::kMax ? max_or_nan(a, b) : a + b;
}

static inline void combine(Row& into, const Row& other, Norm norm) {
  into.power = combine_power(into.power, other.power, norm);
  if (other.max_abs > into.max_abs) into.max_abs = other.max_abs;
  into.nan += other.nan;
  into.inf += other.inf;
  into.zero += other.zero;
}

// Statistics of x * inv_scale from those of x: no element needs to be multiplied for them.
static inline void unscale(Row& row, double inv_scale, Norm norm) {
  const double factor = std::fabs(inv_scale);
  row.max_abs *= factor;
  if (norm == Norm::kSum || norm == Norm::kMax) row.power *= factor;
  if (norm == Norm::kSquares) row.power *= factor * factor;
}

static inline double total_norm(const Row* rows, int64_t n, Norm norm) {
  double power = 0;
  for (int64_t i = 0; i < n; ++i) power = combine_power(power, rows[i].power, norm);
  return norm == Norm::kSquares ? std::sqrt(power) : power;
}

// min(1, max_norm / (total + eps)); an infinite max_norm only measures; NaN stays NaN.
static inline double coefficient(double total, double max_norm) {
  if (max_norm == HUGE_VAL) return 1.0;
  const double coef = max_norm / (total + kEps);
  return coef > 1.0 ? 1.0 : coef;
}

}  // namespace fastclip
