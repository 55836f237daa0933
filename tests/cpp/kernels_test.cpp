// Drives the CPU kernels and passes without torch, so that one source also runs under the thread
// sanitizer and on an emulated processor. Prints one line per failure and a summary.
#include "cpu/kernels.h"

#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/passes.h"
#include "half.h"

using namespace fastclip;
using namespace fastclip::cpu;

namespace {

int passed = 0, failed = 0;

void check(bool ok, const std::string& what) {
  ok ? ++passed : ++failed;
  if (!ok && failed <= 20) std::printf("FAILED: %s\n", what.c_str());
}

constexpr Norm kNorms[] = {Norm::kCount, Norm::kSum, Norm::kSquares, Norm::kMax};
constexpr double kInf = std::numeric_limits<double>::infinity();

double value(Type type, const char* x) {
  uint16_t half;
  float single;
  double wide;
  std::memcpy(&half, x, 2);
  std::memcpy(&single, x, type == Type::kFloat ? 4 : 0);
  switch (type) {
    case Type::kFloat:
      return single;
    case Type::kBFloat16:
      return bfloat16_to_float(half);
    case Type::kHalf:
      return half_to_float(half);
    default:
      std::memcpy(&wide, x, 8);
      return wide;
  }
}

void put(Type type, char* x, double v) {
  const float single = float(v);
  const uint16_t half = type == Type::kHalf ? float_to_half(single) : float_to_bfloat16(single);
  if (type == Type::kFloat) std::memcpy(x, &single, 4);
  if (type == Type::kBFloat16 || type == Type::kHalf) std::memcpy(x, &half, 2);
  if (type == Type::kDouble) std::memcpy(x, &v, 8);
}

bool same(double a, double b) { return a == b || (a != a && b != b); }

bool close(double a, double b) { return same(a, b) || std::fabs(a - b) <= 1e-6 * std::fabs(b); }

bool close(const Row& a, const Row& b) {
  return close(a.power, b.power) && a.max_abs == b.max_abs && a.nan == b.nan && a.inf == b.inf &&
         a.zero == b.zero;
}

// Rounding a double to the nearest half through the grid of halves, by a different road than
// half.h.
double nearest_half(double x) {
  const double magnitude = std::fabs(x);
  if (magnitude != magnitude) return x;
  if (magnitude >= 65520) return std::copysign(kInf, x);
  int exponent;
  std::frexp(magnitude, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 11, -24));
  return std::copysign(std::nearbyint(magnitude / unit) * unit, x);
}

void test_half() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t h = uint16_t(bits);
    const int exponent = (h >> 10) & 31, mantissa = h & 1023;
    double expected = exponent == 31 ? (mantissa ? NAN : kInf)
                      : exponent     ? std::ldexp(1024 + mantissa, exponent - 25)
                                     : std::ldexp(mantissa, -24);
    if (h & 0x8000) expected = -expected;
    check(same(half_to_float(h), expected), "half_to_float " + std::to_string(bits));
    if (exponent == 31) continue;
    const float x = half_to_float(h);
    const float above = half_to_float(uint16_t(h + 1));
    const float middle =
        float((double(x) +
               (exponent == 30 && mantissa == 1023 ? std::copysign(65536.0, x) : double(above))) /
              2);
    for (const float f : {x, middle, std::nextafterf(middle, 0.f), std::nextafterf(middle, 1e9f),
                          std::nextafterf(middle, -1e9f)})
      check(same(half_to_float(float_to_half(f)), nearest_half(f)),
            "float_to_half " + std::to_string(f));
  }
  check(float_to_half(1e-44f) == 0 && float_to_half(-0.f) == 0x8000, "float_to_half near zero");
  check(std::isnan(half_to_float(float_to_half(NAN))), "float_to_half NaN");
}

void test_bfloat16() {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const float x = bit_cast<float>(uint32_t(random()));
    const float y = bfloat16_to_float(float_to_bfloat16(x));
    if (x != x) {
      check(y != y, "float_to_bfloat16 NaN");
      continue;
    }
    // No other bfloat16 may be nearer, and of two equally near ones the even one is taken.
    const uint16_t bits = float_to_bfloat16(x);
    const double low = bfloat16_to_float(uint16_t(bits - 1)),
                 high = bfloat16_to_float(uint16_t(bits + 1));
    const double distance = std::fabs(double(x) - y);
    const bool nearest =
        std::isinf(y) || (!(std::fabs(x - low) < distance) && !(std::fabs(x - high) < distance));
    const bool tie = std::fabs(x - low) == distance || std::fabs(x - high) == distance;
    check(nearest && (!tie || (bits & 1) == 0 || distance == 0),
          "float_to_bfloat16 " + std::to_string(x));
  }
}

std::vector<double> special(std::mt19937& random, int64_t n, int kind) {
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<size_t>(n));
  const double scales[] = {1, 1e-44, 1e-23, 1e20, 3e38, 1e-4};
  for (double& v : values) v = normal(random) * scales[kind % 6];
  if (kind % 6 == 4)
    for (double& v : values) v = std::copysign(3e38, v);
  for (int64_t i = 0; kind >= 6 && i < n; ++i) {
    if (random() % 97 == 0) values[size_t(i)] = random() % 2 ? NAN : -kInf;
    if (random() % 7 == 0) values[size_t(i)] = random() % 2 ? 0.0 : -0.0;
  }
  return values;
}

void test_kernels(const std::string& level) {
  std::mt19937 random(2);
  const int64_t lengths[] = {0,   1,   2,   15,   16,   17,   63,   64,  65,
                             127, 128, 129, 1000, 2047, 2048, 2049, 4100};
  for (int t = 0; t < kTypes; ++t)
    for (const int64_t n : lengths)
      for (int kind = 0; kind < 12; ++kind) {
        const Type type = Type(t);
        const int64_t size = kTypeBytes[t], shift = kind % 3;  // misaligned to the byte
        std::vector<char> memory(size_t(n * size + shift));
        char* x = memory.data() + shift;
        const auto values = special(random, n, kind);
        for (int64_t i = 0; i < n; ++i) put(type, x + i * size, values[size_t(i)]);
        const std::string what = level + " type " + std::to_string(t) + " n " + std::to_string(n) +
                                 " kind " + std::to_string(kind);
        for (const Norm norm : kNorms) {
          Row expected{}, row{};
          for (int64_t i = 0; i < n; ++i) add_element(expected, value(type, x + i * size), norm);
          kernels().measure[t](x, n, norm, row);
          check(close(row, expected), "measure " + what + " norm " + std::to_string(int(norm)));
        }
        std::vector<char> expected = memory;
        const double coef = 0.37;
        for (int64_t i = 0; i < n; ++i) {
          const double v = value(type, x + i * size);
          put(type, expected.data() + shift + i * size,
              type == Type::kDouble ? v * coef : double(float(v) * float(coef)));
        }
        kernels().scale[t](x, n, coef);
        bool equal = true;
        for (int64_t i = 0; i < n; ++i)
          equal &= same(value(type, x + i * size), value(type, expected.data() + shift + i * size));
        check(equal, "scale " + what);
      }
}

// Rows of all lengths around those of vectors, steps and blocks, some of them zero or not finite.
void test_squares(const std::string& level) {
  std::mt19937 random(4);
  const int64_t rows = 5;
  for (int t = 0; t < kTypes; ++t)
    for (const int64_t n : {1, 5, 6, 7, 8, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1000, 2049, 4100})
      for (int kind = 0; kind < 12; ++kind) {
        const Type type = Type(t);
        const int64_t size = kTypeBytes[t], shift = kind % 3;
        std::vector<char> memory(size_t(rows * n * size + shift));  // to its last byte
        char* x = memory.data() + shift;
        auto values = special(random, rows * n, kind);
        std::fill_n(values.begin() + n, n, 0.0);
        for (int64_t i = 0; i < rows * n; ++i) put(type, x + i * size, values[size_t(i)]);
        std::vector<double> powers(rows, 0.0);
        kernels().add_squares[t](x, n, rows, powers.data());
        bool equal = true;
        for (int64_t row = 0; row < rows; ++row) {
          double expected = 0;
          for (int64_t i = row * n; i < (row + 1) * n; ++i)
            expected += value(type, x + i * size) * value(type, x + i * size);
          const double power = powers[size_t(row)];
          // Of an infinity and a NaN in one row either may show.
          equal &= close(power, expected) || (!std::isfinite(power) && !std::isfinite(expected));
        }
        check(equal, "squares " + level + " type " + std::to_string(t) + " n " + std::to_string(n) +
                         " kind " + std::to_string(kind));
      }
}

void run_threads(int workers, void (*fn)(void*), void* ctx) {
  std::vector<std::thread> threads;
  for (int i = 0; i < workers; ++i) threads.emplace_back(fn, ctx);
  for (std::thread& thread : threads) thread.join();
}

struct Strided {
  std::vector<int64_t> sizes, strides;
};

void test_layout() {
  Layout layout;
  const auto make = [&](const Strided& s) {
    return make_layout(s.sizes.data(), s.strides.data(), int64_t(s.sizes.size()), layout);
  };
  check(make({{}, {}}) && layout.dense(), "0-d is dense");
  check(make({{3, 5}, {1, 3}}) && layout.dense(), "a transposed matrix is dense");
  check(make({{2, 3, 4, 5}, {60, 1, 15, 3}}) && layout.dense(), "channels-last is dense");
  check(make({{4, 1, 5}, {5, 77, 1}}) && layout.dense(), "a dimension of one does not count");
  check(make({{4, 5}, {10, 2}}) && !layout.dense() && layout.dims == 1, "every second element");
  check(make({{4, 5}, {7, 1}}) && !layout.dense() && layout.dims == 2, "padded rows");
  const auto by_unit = [&](const Strided& s) {
    return make_layout(s.sizes.data(), s.strides.data(), int64_t(s.sizes.size()), layout,
                       Order::kByUnit);
  };
  check(by_unit({{3, 5}, {5, 1}}) && layout.dense(), "rows are dense by unit");
  check(by_unit({{2, 3, 4, 5}, {60, 1, 15, 3}}) && layout.dense(), "so are those of channels-last");
  check(by_unit({{3, 5}, {1, 3}}) && layout.dims == 2 && layout.stride[0] == 1,
        "columns are not, and the unit comes first");
  check(!by_unit({{4, 5}, {1, 1}}), "a sliding window is refused by unit too");
  check(!make({{4, 5}, {0, 1}}), "an expanded dimension is refused");
  check(!make({{4, 5}, {1, 1}}), "a sliding window is refused");
  check(!make({{2, 3}, {3, 2}}), "interleaved memory is left to others");
}

// A float list of dense and strided pieces, measured by 1 to 4 threads, then rescaled.
void test_passes() {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> memory(3000000), before;
  for (float& v : memory) v = normal(random);
  before = memory;
  Pieces pieces;
  Layout layout;
  const int64_t sizes[] = {500, 400}, strides[] = {1000, 2};
  check(make_layout(sizes, strides, 2, layout), "strided layout");
  pieces.layouts.push_back(layout);
  auto* data = reinterpret_cast<char*>(memory.data());
  pieces.list.push_back({data, 200000, Type::kFloat, 0});
  pieces.list.push_back({nullptr, 0, Type::kFloat, -1});
  for (int i = 0; i < 300; ++i)
    pieces.list.push_back({data + 4 * (500000 + i * 1000), 999, Type::kFloat, -1});
  pieces.list.push_back({data + 4 * 800000, 2000000, Type::kFloat, -1});
  const size_t n = pieces.list.size();

  std::vector<Row> first(n), rows(n);
  measure(pieces, Norm::kSquares, {1, run_threads}, first.data());
  Row expected{};
  for (int64_t r = 0; r < 500; ++r)
    for (int64_t c = 0; c < 400; ++c)
      add_element(expected, memory[size_t(r * 1000 + c * 2)], Norm::kSquares);
  check(close(first[0], expected), "measure strided");
  for (int threads = 1; threads <= 4; ++threads)
    for (int repeat = 0; repeat < 5; ++repeat) {
      measure(pieces, Norm::kSquares, {threads, run_threads}, rows.data());
      check(std::memcmp(rows.data(), first.data(), n * sizeof(Row)) == 0,
            "the same bits for any threads");
    }

  std::vector<double> coefs(n, 0.5);
  coefs[1] = 3;
  coefs[5] = 1;
  scale(pieces, coefs.data(), 1, {4, run_threads});
  int64_t changed = 0;
  for (size_t i = 0; i < memory.size(); ++i) {
    if (memory[i] != before[i]) ++changed;
    check(memory[i] == before[i] || memory[i] == before[i] * 0.5f, "scaled once or not at all");
  }
  check(changed == 200000 + 299 * 999 + 2000000,
        "only what is in the list: " + std::to_string(changed));
}

// Units of a matrix, of its transpose and of rows longer than a chunk, by 1 to 4 threads.
void test_units() {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> memory(900000);
  for (float& v : memory) v = normal(random);
  auto* data = reinterpret_cast<char*>(memory.data());
  Pieces pieces;
  Layout layout;
  const int64_t sizes[] = {300, 400}, strides[] = {1, 300};
  check(make_layout(sizes, strides, 2, layout, Order::kByUnit), "transposed layout");
  pieces.layouts.push_back(layout);
  pieces.list = {{data, 400000, Type::kFloat, -1},
                 {data + 4 * 400000, 120000, Type::kFloat, 0},
                 {nullptr, 0, Type::kFloat, -1},
                 {data + 4 * 520000, 300000, Type::kFloat, -1}};
  const Units units[] = {{0, 1000, 400}, {1000, 300, 400}, {1300, 7, 0}, {1307, 3, 100000}};
  const auto unit_of = [&](int64_t i) -> int64_t {  // of the i-th element in memory
    if (i < 400000) return i / 400;
    if (i < 520000) return 1000 + (i - 400000) % 300;
    return i < 820000 ? 1307 + (i - 520000) / 100000 : -1;
  };
  std::vector<double> powers(1310, 0.0), first(1310), norms(1310), alone(1310);
  for (int64_t i = 0; i < 820000; ++i)
    powers[size_t(unit_of(i))] += double(memory[size_t(i)]) * memory[size_t(i)];
  Row rows[4], expected[4];
  measure_units(pieces, units, Norm::kSum, {1, run_threads}, expected, first.data());
  for (int64_t i = 0; i < 1310; ++i)
    check(close(first[size_t(i)], std::sqrt(powers[size_t(i)])),
          "norm of unit " + std::to_string(i));
  for (int threads = 1; threads <= 4; ++threads) {
    measure_units(pieces, units, Norm::kSum, {threads, run_threads}, rows, norms.data());
    measure_units(pieces, units, Norm::kSum, {threads, run_threads}, nullptr, alone.data());
    check(std::memcmp(rows, expected, sizeof rows) == 0 && norms == first && alone == first,
          "the same bits for any threads, with or without rows");
  }
  measure(pieces, Norm::kSum, {1, run_threads}, rows);
  for (int p = 0; p < 4; ++p) check(close(expected[p], rows[p]), "the rows of measure()");

  std::vector<double> coefs(1310);
  for (size_t i = 0; i < coefs.size(); ++i) coefs[i] = i % 3 == 0 ? 1 : 0.25 + double(i % 5);
  const std::vector<float> before = memory;
  scale_units(pieces, units, coefs.data(), {4, run_threads});
  bool right = true;
  for (int64_t i = 0; i < int64_t(memory.size()); ++i) {
    const float coef = unit_of(i) < 0 ? 1.f : float(coefs[size_t(unit_of(i))]);
    right &= memory[size_t(i)] == before[size_t(i)] * coef;
  }
  check(right, "each unit by its own coefficient");
}

}  // namespace

int main() {
  test_half();
  test_bfloat16();
  for (const char* level : {"plain", "avx2", "avx512"}) {
    if (!choose_kernels(level)) {
      std::printf("no %s here\n", level);
      continue;
    }
    test_kernels(level);
    test_squares(level);
  }
  test_layout();
  test_passes();
  test_units();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
