// Which block works on what, for lists of the same sizes, dtypes and layouts on one stream: found
// out once and kept. Plain C++: neither torch nor CUDA is needed here.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "arguments.h"

namespace fastclip::cuda {

// What a device offers.
struct Limits {
  int blocks;                 // that are resident at once
  int cooperative_blocks;     // the same for the cooperative kernel; 0: there is none
  int64_t cooperative_bytes;  // lists of at most so much are served by it
  int addresses;              // that fit into the arguments of a launch
};

// A list cut into parts, those of one block next to each other.
struct Cut {
  std::vector<Part> parts;
  std::vector<int32_t> first_part;  // of each block, and one past the last
  int32_t slots = 0;                // parts of tensors that have several

  int blocks() const { return int(first_part.size()) - 1; }
};
Cut cut(const Pieces& pieces, int most_blocks);

// Where and for what a plan holds, beside the list itself.
struct Setting {
  int device;
  int64_t stream;
  Limits limits;
  bool capturing;  // into a CUDA graph: nothing outside of the graph may be relied upon
};

class Plan {
 public:
  Plan(const Pieces& pieces, const Setting& setting);

  bool fits(const Pieces& pieces, const Setting& setting, uint64_t hash) const;
  // The addresses seen last are known to be distinct and, if they are stored, to be on the device.
  bool has_addresses_of(const Pieces& pieces) const;
  void note_addresses(const Pieces& pieces);

  // Device memory: first the words that it holds to begin with, then room that needs none.
  const std::vector<uint64_t>& words() const { return words_; }
  int64_t memory_words() const { return int64_t(words_.size()) + slots_ * kColumns; }
  Tables tables(uint64_t* memory) const;

  // Whether addresses are among the words, because the arguments have no room for them.
  bool stores_addresses() const { return stores_addresses_; }
  struct Range {
    int64_t first, n;
  };
  // Which words have to be sent; until note_addresses() is told that they were, all of them have.
  Range replace_addresses(const Pieces& pieces);

  const Pieces& pieces() const { return pieces_; }
  bool cooperative() const { return cooperative_; }
  // Two launches from now on. They take the blocks as they are: none waits for another.
  void forgo_cooperative() { cooperative_ = false; }
  int blocks() const { return blocks_; }

  std::shared_ptr<void> memory;  // what the words lie in; owned for whoever made it
  Tables on_device{};

 private:
  Pieces pieces_;
  Setting setting_;
  uint64_t hash_;
  bool cooperative_;
  bool stores_addresses_;
  int blocks_;
  int64_t slots_;
  std::vector<int32_t> rows_;  // of each part
  std::vector<uint64_t> words_;
  int64_t parts_, first_part_, layouts_, arrived_, factor_, addresses_;  // places in words_
};

uint64_t hash_of(const Pieces& pieces);

// The plans used last, the latest first.
class Plans {
 public:
  Plan* find(const Pieces& pieces, const Setting& setting);
  Plan* add(std::unique_ptr<Plan> plan);

 private:
  std::list<std::unique_ptr<Plan>> plans_;
};

}  // namespace fastclip::cuda
