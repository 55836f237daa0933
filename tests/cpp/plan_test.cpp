// The host's part of the CUDA kernels without CUDA: how lists are cut, and which plans are kept.
#include "cuda/plan.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

using namespace fastclip;
using namespace fastclip::cuda;

namespace {

int checks = 0, failures = 0;

void check(bool ok, const char* what) {
  ++checks;
  if (ok) return;
  ++failures;
  std::printf("failed: %s\n", what);
}

Pieces list_of(const std::vector<int64_t>& sizes, Type type = Type::kFloat) {
  Pieces pieces;
  for (size_t i = 0; i < sizes.size(); ++i)
    pieces.list.push_back({reinterpret_cast<char*>(4096 * (i + 1)), sizes[i], type, -1});
  return pieces;
}

// Every element in one part, parts in order and cut at tiles, slots for tensors with several parts.
void check_parts(const Pieces& pieces, const Cut& cut) {
  size_t i = 0;
  int32_t slots = 0;
  for (size_t row = 0; row < pieces.list.size(); ++row) {
    const Piece& piece = pieces.list[row];
    const size_t first = i;
    int64_t done = 0;
    for (; i < cut.parts.size() && size_t(cut.parts[i].row) == row; ++i) {
      const Part& part = cut.parts[i];
      check(part.tile * tile_elements(piece.type) == done, "parts follow each other");
      check(part.type == int32_t(piece.type) && part.layout == piece.layout, "kind of a part");
      check(part.n <= 1u << 30, "a thread counts in 32 bits");
      done += part.n;
    }
    check(done == piece.numel, "all elements");
    const auto n = int32_t(i - first);
    check(n >= 1, "a part for every tensor");
    for (size_t k = first; k < i; ++k) {
      check(cut.parts[k].parts == n, "number of parts");
      if (n > 1) check(cut.parts[k].first_slot == slots, "first slot");
      if (n > 1) check(cut.parts[k].slot == slots + int32_t(k - first), "slot");
    }
    if (n > 1) slots += n;
  }
  check(i == cut.parts.size() && slots == cut.slots, "no more parts, no more slots");
}

void check_blocks(const Cut& cut, int most) {
  check(cut.blocks() >= 1 && cut.blocks() <= most, "number of blocks");
  check(cut.first_part.front() == 0, "first part");
  check(size_t(cut.first_part.back()) == cut.parts.size(), "one past the last part");
  for (int b = 0; b < cut.blocks(); ++b)
    check(cut.first_part[b] < cut.first_part[b + 1], "no block without a part");
}

int64_t largest_block(const Cut& cut) {
  int64_t largest = 0;
  for (int b = 0; b < cut.blocks(); ++b) {
    int64_t bytes = 0;
    for (int32_t i = cut.first_part[b]; i < cut.first_part[b + 1]; ++i)
      bytes += cut.parts[i].n * kTypeBytes[cut.parts[i].type];
    largest = std::max(largest, bytes);
  }
  return largest;
}

void random_lists() {
  std::mt19937_64 random(0);
  for (int repeat = 0; repeat < 300; ++repeat) {
    Pieces pieces;
    for (size_t n = random() % 40 + 1; n > 0; --n) {
      const auto numel = int64_t(random() % (int64_t(1) << random() % 24));
      const auto type = Type(random() % 4);
      pieces.list.push_back({nullptr, numel, type, random() % 8 == 0 ? 0 : -1});
    }
    const int most = int(random() % 600) + 1;
    const Cut parts = cut(pieces, most);
    check_parts(pieces, parts);
    check_blocks(parts, most);
  }
}

// No block has much more than its share of a list that is worth cutting.
void balance() {
  std::vector<int64_t> gpt2 = {50257 * 768, 1024 * 768};
  for (int layer = 0; layer < 12; ++layer)
    for (int64_t n :
         {768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768})
      gpt2.push_back(n);
  for (const std::vector<int64_t>& sizes :
       {gpt2, std::vector<int64_t>{int64_t(1) << 33}, std::vector<int64_t>(1000, 300'000)}) {
    const Pieces pieces = list_of(sizes, Type::kBFloat16);
    const Cut parts = cut(pieces, 528);
    check_parts(pieces, parts);
    check_blocks(parts, 528);
    int64_t bytes = 0;
    for (int64_t n : sizes) bytes += 2 * n;
    check(parts.blocks() == 528, "every block has work");
    check(largest_block(parts) <= bytes / 528 * 1.05 + kTileBytes, "blocks share evenly");
  }
  check_parts(list_of({int64_t(1) << 40}), cut(list_of({int64_t(1) << 40}), 4));
  check(cut(list_of(std::vector<int64_t>(64, 100)), 528).blocks() == 64, "small tensors spread");
}

void kept_plans() {
  const Limits limits = {8, 4, 1 << 20, 3};
  const Setting setting = {0, 7, limits, false};
  Plans plans;
  const auto make = [&](int64_t n) { plans.add(std::make_unique<Plan>(list_of({n, 5}), setting)); };
  for (int64_t n = 1; n <= 32; ++n) make(n);
  check(plans.find(list_of({1, 5}), setting) != nullptr, "32 are kept");
  make(33);
  check(plans.find(list_of({2, 5}), setting) == nullptr, "the one used longest ago leaves");
  check(plans.find(list_of({1, 5}), setting) != nullptr, "one used since stays");
  check(plans.find(list_of({5, 1}), setting) == nullptr, "sizes in their order");
  check(plans.find(list_of({1, 5}, Type::kHalf), setting) == nullptr, "dtypes");
  Setting other = setting;
  other.stream = 8;
  check(plans.find(list_of({1, 5}), other) == nullptr, "streams share nothing");
  other = setting;
  other.device = 1;
  check(plans.find(list_of({1, 5}), other) == nullptr, "devices share nothing");
  Pieces strided = list_of({1, 5});
  const auto layout_of = [&](int64_t stride) {
    strided.layouts.resize(1);
    const int64_t sizes[] = {5}, strides[] = {stride};
    check(make_layout(sizes, strides, 1, strided.layouts[0]), "a layout");
    strided.list[1].layout = 0;
  };
  layout_of(2);
  plans.add(std::make_unique<Plan>(strided, setting));
  check(plans.find(strided, setting) != nullptr, "layouts are known");
  layout_of(3);
  check(plans.find(strided, setting) == nullptr, "layouts are told apart");
}

void addresses() {
  const Setting setting = {0, 0, {8, 0, 0, 3}, false};
  Pieces pieces = list_of({100'000, 5, 0, 7});  // one more than fits into the arguments
  Plan plan(pieces, setting);
  check(plan.stores_addresses() && plan.has_addresses_of(pieces), "known from the beginning");
  pieces.list[1].data += 64;
  check(!plan.has_addresses_of(pieces), "one has moved");
  const Plan::Range moved = plan.replace_addresses(pieces);
  check(moved.n == 1 && plan.words()[moved.first] == 2 * 4096 + 64, "that one is sent");
  check(!plan.has_addresses_of(pieces), "not known before it has been");
  check(plan.replace_addresses(pieces).n > 3, "then all are sent again");
  plan.note_addresses(pieces);
  check(plan.has_addresses_of(pieces), "known now");
  check(!Plan(list_of({1, 2, 3}), setting).stores_addresses(), "in the arguments");
}

}  // namespace

int main() {
  random_lists();
  balance();
  kept_plans();
  addresses();
  std::printf("%d passed, %d failed\n", checks - failures, failures);
  return failures != 0;
}
