// The KV cache: one pool of blocks per group of layers. Knows sizes and addresses, not who owns which block.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/memory.h"
#include "kernels/kernels.h"

namespace octavo {

inline constexpr std::int32_t kLeastHeadDim = 32;
inline constexpr std::int32_t kMostHeadDim = 256;

struct KvGroup {
  std::vector<std::int32_t> layers;
  std::int32_t num_blocks;
  std::int32_t num_kv_heads;
  std::int32_t head_dim;
  std::int32_t window;  // tokens that stay readable; 0: all
};

class KvStore {
 public:
  // Reserves address space; the system commits pages, zero filled, when blocks are first written. Block size 8, 16 or
  // 32; head_dim a multiple of 16 in 32..256; every layer in exactly one group. Throws std::invalid_argument,
  // std::bad_alloc.
  KvStore(KvFormat format, std::int32_t block_size, std::vector<KvGroup> groups);

  std::int32_t block_size() const { return block_size_; }
  std::int32_t num_groups() const { return static_cast<std::int32_t>(groups_.size()); }
  const KvGroup& group(std::int32_t index) const { return groups_[index]; }
  bool has_layer(std::int32_t layer) const;
  std::int32_t group_of(std::int32_t layer) const { return layers_[layer].group; }
  const KvCache& cache(std::int32_t layer) const { return layers_[layer].cache; }
  std::size_t reserved_bytes() const { return mapping_.size(); }

  // Bytes of one block of a group, all its layers together. Outside of the cache a block is these layers one after the
  // other, in the group's order. Throws std::invalid_argument for a group that is not there, as those below do also for
  // a block.
  std::size_t block_bytes(std::int32_t group) const;
  // Copies blocks one after the other, so that a later pair sees what an earlier one has written.
  void copy(std::int32_t group, std::span<const std::int32_t> sources, std::span<const std::int32_t> targets);
  // Blocks out of and into the cache; `bytes` holds them one after the other.
  void read(std::int32_t group, std::span<const std::int32_t> blocks, std::span<std::uint8_t> bytes) const;
  void write(std::int32_t group, std::span<const std::int32_t> blocks, std::span<const std::uint8_t> bytes);

 private:
  std::size_t layer_block_bytes(const KvGroup& group) const;
  void check(std::int32_t group, std::span<const std::int32_t> blocks) const;
  std::uint8_t* at(std::int32_t layer, std::int32_t block, std::size_t bytes) const;

  struct Layer {
    std::int32_t group = -1;
    KvCache cache{};
  };

  KvFormat format_;
  std::int32_t block_size_;
  std::vector<KvGroup> groups_;
  std::vector<Layer> layers_;
  Mapping mapping_;
};

}  // namespace octavo
