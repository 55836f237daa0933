// The passes over a gradient list, and in which order the parts are added up.
#include "passes.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "kernels.h"
#include "schedule.h"
#include "strided.h"

namespace fastclip::cpu {
namespace {

void measure_strided(const Piece& piece, const Layout& layout, Range range, Norm norm, Row& row) {
  alignas(64) char buffer[kBufferElements * 8];
  const int type = int(piece.type);
  for (int64_t i = 0; i < range.n; i += kBufferElements) {
    const int64_t n = std::min(kBufferElements, range.n - i);
    kGather[type](piece.data, layout, range.begin + i, n, buffer);
    kernels().measure[type](buffer, n, norm, row);
  }
}

void scale_strided(const Piece& piece, const Layout& layout, Range range, double coef) {
  alignas(64) char buffer[kBufferElements * 8];
  const int type = int(piece.type);
  for (int64_t i = 0; i < range.n; i += kBufferElements) {
    const int64_t n = std::min(kBufferElements, range.n - i);
    kGather[type](piece.data, layout, range.begin + i, n, buffer);
    kernels().scale[type](buffer, n, coef);
    kScatter[type](piece.data, layout, range.begin + i, n, buffer);
  }
}

bool writes_nothing(Type type, double coef) {
  return type == Type::kDouble ? coef == 1 : float(coef) == 1;
}

// A part of a chunk, unit after unit, in memory or in a buffer.
struct Run {
  char* data;
  int64_t n;
  int64_t width;  // of a unit, or of the part of one that this is
  int64_t unit;   // of the chunk, the first or only one here
};

// Calls f(run, put) for the runs of a chunk, short enough to be read twice from the first-level
// cache. put(i, n) writes n elements of the run from the i-th on back to where they belong.
template <class F>
void for_unit_runs(const Piece& piece, const Layout* layout, Range chunk, int64_t width, F f) {
  alignas(64) char buffer[kBufferElements * 8];
  const int type = int(piece.type);
  const bool whole = width <= kBufferElements;
  for (int64_t i = 0, n; i < chunk.n; i += n) {
    const int64_t most = whole ? kBufferElements / width * width : width - i % width;
    n = std::min({most, kBufferElements, chunk.n - i});
    const int64_t begin = chunk.begin + i;
    char* data = layout ? buffer : piece.data + begin * kTypeBytes[type];
    if (layout) kGather[type](piece.data, *layout, begin, n, buffer);
    f(Run{data, n, std::min(width, n), i / width}, [&](int64_t from, int64_t count) {
      if (layout)
        kScatter[type](piece.data, *layout, begin + from, count, buffer + from * kTypeBytes[type]);
    });
  }
}

const Layout* layout_of(const Pieces& pieces, int64_t p) {
  const int32_t index = pieces.list[p].layout;
  return index < 0 ? nullptr : &pieces.layouts[index];
}

// The rows of a list, for threads that measure its chunks in any order.
class Rows {
 public:
  Rows(const Schedule& schedule, int64_t n, Row* rows)
      : schedule_(schedule), rows_(rows), partial_of_(n, -1) {
    for (int64_t p = 0; p < n; ++p) {
      rows[p] = Row{};
      if (schedule.chunks(p) < 2) continue;
      partial_of_[p] = int64_t(partial_.size());
      partial_.resize(partial_.size() + schedule.chunks(p));
    }
  }

  Row& of(int64_t p, int64_t c) {
    return partial_of_[p] < 0 ? rows_[p] : partial_[partial_of_[p] + c];
  }

  void combine_chunks(Norm norm) {
    for (int64_t p = 0; p < int64_t(partial_of_.size()); ++p)
      if (partial_of_[p] >= 0)
        for (int64_t c = 0; c < schedule_.chunks(p); ++c) combine(rows_[p], of(p, c), norm);
  }

 private:
  const Schedule& schedule_;
  Row* rows_;
  std::vector<Row> partial_;  // a piece of one chunk goes straight into its row
  std::vector<int64_t> partial_of_;
};

// The 2-norms of all units of a list, in the same way; of a unit that is longer than a chunk the
// parts are sums of squares.
class Norms {
 public:
  Norms(const Schedule& schedule, const Units* units, int64_t n, double* norms)
      : schedule_(schedule), units_(units), n_(n), norms_(norms), partial_(schedule.first[n]) {
    for (int64_t p = 0; p < n; ++p) std::fill_n(norms + units[p].first, units[p].count, 0.0);
  }

  // f(sums) adds squares to the sums of the units of a chunk, or to that of the part it has of one.
  template <class F>
  void add(int64_t p, int64_t c, Range chunk, F f) {
    if (is_cut(p)) return f(&partial_[schedule_.first[p] + c]);
    const int64_t width = units_[p].width;
    double* norms = norms_ + units_[p].first + chunk.begin / width;
    f(norms);
    for (int64_t i = 0; i < chunk.n / width; ++i) norms[i] = std::sqrt(norms[i]);
  }

  void combine_chunks() {
    for (int64_t p = 0; p < n_; ++p) {
      if (!is_cut(p)) continue;
      double* norms = norms_ + units_[p].first;
      for (int64_t c = 0; c < schedule_.chunks(p); ++c)
        norms[c / schedule_.parts(units_[p])] += partial_[schedule_.first[p] + c];
      for (int64_t i = 0; i < units_[p].count; ++i) norms[i] = std::sqrt(norms[i]);
    }
  }

 private:
  bool is_cut(int64_t p) const { return units_[p].width > schedule_.chunk; }

  const Schedule& schedule_;
  const Units* units_;
  int64_t n_;
  double* norms_;
  std::vector<double> partial_;
};

}  // namespace

void measure(const Pieces& pieces, Norm norm, const Threads& threads, Row* into) {
  const Schedule schedule(pieces.list);
  Rows rows(schedule, int64_t(pieces.list.size()), into);
  for_all_chunks(schedule, threads, false, [&](int64_t p, int64_t c) {
    const Piece& piece = pieces.list[p];
    const Range range = schedule.range({0, 1, piece.numel}, c);
    Row& row = rows.of(p, c);
    if (piece.layout >= 0)
      return measure_strided(piece, pieces.layouts[piece.layout], range, norm, row);
    const int type = int(piece.type);
    kernels().measure[type](piece.data + range.begin * kTypeBytes[type], range.n, norm, row);
  });
  rows.combine_chunks(norm);
}

void measure_units(const Pieces& pieces, const Units* units, Norm norm, const Threads& threads,
                   Row* into, double* unit_norms) {
  const Schedule schedule(pieces.list, units);
  const int64_t n = int64_t(pieces.list.size());
  std::optional<Rows> rows;
  if (into != nullptr) rows.emplace(schedule, n, into);
  Norms norms(schedule, units, n, unit_norms);
  for_all_chunks(schedule, threads, false, [&](int64_t p, int64_t c) {
    const Piece& piece = pieces.list[p];
    const Range chunk = schedule.range(units[p], c);
    const int64_t width = std::min(units[p].width, chunk.n);
    const int type = int(piece.type);
    Row* row = rows ? &rows->of(p, c) : nullptr;
    norms.add(p, c, chunk, [&](double* sums) {
      for_unit_runs(piece, layout_of(pieces, p), chunk, width, [&](const Run& run, auto) {
        if (row != nullptr) kernels().measure[type](run.data, run.n, norm, *row);
        kernels().add_squares[type](run.data, run.width, run.n / run.width, sums + run.unit);
      });
    });
  });
  if (rows) rows->combine_chunks(norm);
  norms.combine_chunks();
}

void scale(const Pieces& pieces, const double* coefs, int64_t stride, const Threads& threads) {
  const Schedule schedule(pieces.list);
  for_all_chunks(schedule, threads, true, [&](int64_t p, int64_t c) {
    const Piece& piece = pieces.list[p];
    const double coef = coefs[p * stride];
    if (writes_nothing(piece.type, coef)) return;
    const Range range = schedule.range({0, 1, piece.numel}, c);
    if (piece.layout >= 0) return scale_strided(piece, pieces.layouts[piece.layout], range, coef);
    const int type = int(piece.type);
    kernels().scale[type](piece.data + range.begin * kTypeBytes[type], range.n, coef);
  });
}

void scale_units(const Pieces& pieces, const Units* units, const double* coefs,
                 const Threads& threads) {
  const Schedule schedule(pieces.list, units);
  for_all_chunks(schedule, threads, true, [&](int64_t p, int64_t c) {
    const Piece& piece = pieces.list[p];
    const Range chunk = schedule.range(units[p], c);
    const int64_t width = std::min(units[p].width, chunk.n);
    const double* own = coefs + units[p].first + chunk.begin / units[p].width;
    const auto is_left = [&](double coef) { return writes_nothing(piece.type, coef); };
    if (std::all_of(own, own + chunk.n / width, is_left)) return;
    const int type = int(piece.type);
    for_unit_runs(piece, layout_of(pieces, p), chunk, width, [&](const Run& run, auto put) {
      for (int64_t i = 0; i < run.n; i += run.width) {
        const double coef = own[run.unit + i / run.width];
        if (is_left(coef)) continue;
        kernels().scale[type](run.data + i * kTypeBytes[type], run.width, coef);
        put(i, run.width);
      }
    });
  });
}

}  // namespace fastclip::cpu
