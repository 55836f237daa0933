#include "plan.h"

#include <algorithm>
#include <cstring>

namespace fastclip::cuda {
namespace {

constexpr size_t kKept = 32;  // plans
// What a part may cost beside reading it: 2 us, in which one of 528 blocks reads 16 KiB of the
// 4.3 TB/s that an H200 can. A guess from latencies; not measured.
constexpr int64_t kPartBytes = 16384;
constexpr int64_t kStridedCost = 4;                  // of a byte that is read element by element
constexpr int64_t kMostElements = int64_t(1) << 30;  // of a part: its threads count in 32 bits

int64_t cost_of(const Piece& piece) { return piece.layout < 0 ? 1 : kStridedCost; }

int64_t tiles_of(const Piece& piece) {
  const int64_t elements = tile_elements(piece.type);
  return (piece.numel + elements - 1) / elements;
}

// Fills blocks with parts one after the other, each up to its share of the whole cost.
class Cutter {
 public:
  Cutter(const Pieces& pieces, int most_blocks) {
    for (const Piece& piece : pieces.list)
      total_ += kPartBytes + tiles_of(piece) * kTileBytes * cost_of(piece);
    const int64_t useful = (total_ + kPartBytes - 1) / kPartBytes;
    limits_ = std::max<int64_t>(1, std::min<int64_t>(most_blocks, useful));
  }

  void add(const Piece& piece, int32_t row) {
    const size_t first = cut_.parts.size();
    const int64_t tiles = tiles_of(piece), most = kMostElements / tile_elements(piece.type);
    const int64_t cost = kTileBytes * cost_of(piece);
    done_ += kPartBytes;
    int64_t tile = 0;
    do {  // once for a tensor without elements too: its row has to be written
      while (room(cost) <= 0 && limit_ + 1 < limits_) next_limit();
      const int64_t n = std::min({tiles - tile, std::max<int64_t>(room(cost), 1), most});
      append(piece, row, tile, n);
      done_ += n * cost;
      tile += n;
    } while (tile < tiles);
    number(first);
  }

  Cut finish() {
    cut_.first_part.push_back(int32_t(cut_.parts.size()));
    return std::move(cut_);
  }

 private:
  // What the open block still takes, in tiles, to the nearest.
  int64_t room(int64_t cost) const {
    if (limit_ + 1 == limits_) return INT64_MAX;
    return (total_ / limits_ * (limit_ + 1) - done_ + cost / 2) / cost;
  }

  void next_limit() {
    ++limit_;
    open_ = true;
  }

  void append(const Piece& piece, int32_t row, int64_t tile, int64_t tiles) {
    if (open_) cut_.first_part.push_back(int32_t(cut_.parts.size()));
    open_ = false;
    const int64_t elements = tile_elements(piece.type);
    const int64_t n = std::min(tiles * elements, piece.numel - tile * elements);
    cut_.parts.push_back(
        {uint32_t(tile), uint32_t(n), row, int32_t(piece.type), piece.layout, 1, 0, 0});
  }

  // The parts from `first` on are one tensor's.
  void number(size_t first) {
    const auto n = int32_t(cut_.parts.size() - first);
    if (n == 1) return;
    for (int32_t i = 0; i < n; ++i) {
      Part& part = cut_.parts[first + size_t(i)];
      part.parts = n;
      part.slot = cut_.slots + i;
      part.first_slot = cut_.slots;
    }
    cut_.slots += n;
  }

  Cut cut_;
  int64_t total_ = 0, done_ = 0;
  int64_t limits_, limit_ = 0;  // how many, and which one the open block ends at
  bool open_ = true;            // the next part begins a block
};

int64_t bytes_of(const Pieces& pieces) {
  int64_t bytes = 0;
  for (const Piece& piece : pieces.list) bytes += piece.numel * kTypeBytes[int(piece.type)];
  return bytes;
}

// Appends `items`, which are a whole number of words but for the last; returns where they begin.
template <class T>
int64_t append(std::vector<uint64_t>& words, const std::vector<T>& items) {
  const size_t place = words.size(), bytes = items.size() * sizeof(T);
  words.resize(place + (bytes + 7) / 8);
  if (bytes > 0) std::memcpy(words.data() + place, items.data(), bytes);
  return int64_t(place);
}

DeviceLayout for_device(const Layout& layout) {
  DeviceLayout out{layout.dims, {}, {}};
  std::copy(layout.size.begin(), layout.size.end(), out.size);
  std::copy(layout.stride.begin(), layout.stride.end(), out.stride);
  return out;
}

bool same(const Layout& a, const Layout& b) {
  return a.dims == b.dims && a.size == b.size && a.stride == b.stride;
}

bool same(const Limits& a, const Limits& b) {
  return a.blocks == b.blocks && a.cooperative_blocks == b.cooperative_blocks &&
         a.cooperative_bytes == b.cooperative_bytes && a.addresses == b.addresses;
}

// But for the addresses.
bool same(const Pieces& a, const Pieces& b) {
  const auto alike = [](const Piece& x, const Piece& y) {
    return x.numel == y.numel && x.type == y.type && x.layout == y.layout;
  };
  return std::equal(a.list.begin(), a.list.end(), b.list.begin(), b.list.end(), alike) &&
         std::equal(a.layouts.begin(), a.layouts.end(), b.layouts.begin(), b.layouts.end(),
                    [](const Layout& x, const Layout& y) { return same(x, y); });
}

}  // namespace

Cut cut(const Pieces& pieces, int most_blocks) {
  Cutter cutter(pieces, most_blocks);
  for (size_t row = 0; row < pieces.list.size(); ++row) cutter.add(pieces.list[row], int32_t(row));
  return cutter.finish();
}

Plan::Plan(const Pieces& pieces, const Setting& setting)
    : pieces_(pieces), setting_(setting), hash_(hash_of(pieces)) {
  const Limits& limits = setting.limits;
  cooperative_ = !setting.capturing && limits.cooperative_blocks > 0 &&
                 bytes_of(pieces) <= limits.cooperative_bytes;
  stores_addresses_ = int64_t(pieces.list.size()) > limits.addresses;
  const Cut parts = cut(pieces, cooperative_ ? limits.cooperative_blocks : limits.blocks);
  blocks_ = parts.blocks();
  slots_ = parts.slots;
  for (const Part& part : parts.parts) rows_.push_back(part.row);
  std::vector<DeviceLayout> layouts;
  for (const Layout& layout : pieces.layouts) layouts.push_back(for_device(layout));

  parts_ = append(words_, parts.parts);
  first_part_ = append(words_, parts.first_part);
  layouts_ = append(words_, layouts);
  arrived_ = append(words_, std::vector<unsigned>(size_t(1 + slots_), 0));
  factor_ = append(words_, std::vector<double>{1.0});
  addresses_ = int64_t(words_.size());
  if (stores_addresses_) words_.resize(words_.size() + rows_.size());
  replace_addresses(pieces);
  note_addresses(pieces);
}

bool Plan::fits(const Pieces& pieces, const Setting& setting, uint64_t hash) const {
  return hash == hash_ && setting.device == setting_.device && setting.stream == setting_.stream &&
         same(setting.limits, setting_.limits) && same(pieces, pieces_);
}

bool Plan::has_addresses_of(const Pieces& pieces) const {
  return std::equal(pieces.list.begin(), pieces.list.end(), pieces_.list.begin(),
                    [](const Piece& x, const Piece& y) { return x.data == y.data; });
}

void Plan::note_addresses(const Pieces& pieces) {
  for (size_t i = 0; i < pieces.list.size(); ++i) pieces_.list[i].data = pieces.list[i].data;
}

Plan::Range Plan::replace_addresses(const Pieces& pieces) {
  if (!stores_addresses_) return {0, 0};
  int64_t first = int64_t(words_.size()), end = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const size_t row = size_t(rows_[i]);
    const int64_t place = addresses_ + int64_t(i);
    words_[size_t(place)] = reinterpret_cast<uintptr_t>(pieces.list[row].data);
    if (pieces.list[row].data == pieces_.list[row].data) continue;
    first = std::min(first, place);
    end = place + 1;
  }
  for (Piece& piece : pieces_.list) piece.data = nullptr;
  return {first, std::max<int64_t>(0, end - first)};
}

Tables Plan::tables(uint64_t* memory) const {
  const auto at = [&](int64_t place) { return static_cast<void*>(memory + place); };
  return {static_cast<const Part*>(at(parts_)),
          static_cast<const int32_t*>(at(first_part_)),
          static_cast<const DeviceLayout*>(at(layouts_)),
          stores_addresses_ ? memory + addresses_ : nullptr,
          static_cast<Row*>(at(int64_t(words_.size()))),
          static_cast<unsigned*>(at(arrived_)),
          static_cast<double*>(at(factor_))};
}

uint64_t hash_of(const Pieces& pieces) {
  uint64_t hash = pieces.list.size();
  for (const Piece& piece : pieces.list) {
    const auto kind = uint64_t(piece.type) << 32 ^ uint64_t(uint32_t(piece.layout));
    hash = (hash ^ uint64_t(piece.numel) ^ kind << 24) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return hash;
}

Plan* Plans::find(const Pieces& pieces, const Setting& setting) {
  const uint64_t hash = hash_of(pieces);
  for (auto plan = plans_.begin(); plan != plans_.end(); ++plan) {
    if (!(*plan)->fits(pieces, setting, hash)) continue;
    plans_.splice(plans_.begin(), plans_, plan);
    return plan->get();
  }
  return nullptr;
}

Plan* Plans::add(std::unique_ptr<Plan> plan) {
  plans_.push_front(std::move(plan));
  if (plans_.size() > kKept) plans_.pop_back();
  return plans_.front().get();
}

}  // namespace fastclip::cuda
