#include "core/kv_store.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

constexpr std::int32_t kMostLayers = 4096;

[[noreturn]] void refuse(const std::string& what, std::int64_t got, const std::string& expected) {
  throw std::invalid_argument(what + " must be " + expected + ", got " + std::to_string(got));
}

}  // namespace

KvStore::KvStore(KvFormat format, std::int32_t block_size, std::vector<KvGroup> groups)
    : format_(format), block_size_(block_size), groups_(std::move(groups)) {
  if (block_size != 8 && block_size != 16 && block_size != 32) refuse("block_size", block_size, "8, 16 or 32");
  const auto layer_bytes = [&](const KvGroup& group) {
    return static_cast<std::size_t>(group.num_blocks) * layer_block_bytes(group);
  };
  std::size_t total = 0;
  for (std::int32_t g = 0; g < num_groups(); ++g) {
    const KvGroup& group = groups_[g];
    if (group.num_blocks < 1) refuse("num_blocks", group.num_blocks, "at least 1");
    if (group.num_kv_heads < 1 || group.num_kv_heads > 65536) refuse("num_kv_heads", group.num_kv_heads, "in 1..65536");
    if (group.head_dim < kLeastHeadDim || group.head_dim > kMostHeadDim || group.head_dim % kPanel != 0)
      refuse("head_dim", group.head_dim, "a multiple of 16 in 32..256");
    if (group.window < 0) refuse("window", group.window, "positive, or 0 for none");
    for (const std::int32_t layer : group.layers) {
      if (layer < 0 || layer >= kMostLayers) refuse("a layer", layer, "in 0.." + std::to_string(kMostLayers - 1));
      if (static_cast<std::size_t>(layer) >= layers_.size()) layers_.resize(layer + 1);
      if (layers_[layer].group >= 0) refuse("a layer", layer, "in one group");
      layers_[layer] = {g, {format, block_size, group.num_kv_heads, group.head_dim, nullptr}};
      total += layer_bytes(group);
    }
  }
  mapping_ = Mapping(total, Mapping::Pages::kHuge);
  std::uint8_t* at = mapping_.data();
  for (const KvGroup& group : groups_) {
    for (const std::int32_t layer : group.layers) {
      layers_[layer].cache.data = at;
      at += layer_bytes(group);
    }
  }
}

bool KvStore::has_layer(std::int32_t layer) const {
  return layer >= 0 && static_cast<std::size_t>(layer) < layers_.size() && layers_[layer].group >= 0;
}

std::size_t KvStore::block_bytes(std::int32_t group) const {
  check(group, {});
  return groups_[group].layers.size() * layer_block_bytes(groups_[group]);
}

void KvStore::copy(std::int32_t group, std::span<const std::int32_t> sources, std::span<const std::int32_t> targets) {
  check(group, sources);
  check(group, targets);
  if (sources.size() != targets.size())
    refuse("the number of targets", static_cast<std::int64_t>(targets.size()), std::to_string(sources.size()));
  const std::size_t bytes = layer_block_bytes(groups_[group]);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (sources[i] == targets[i]) continue;
    for (const std::int32_t layer : groups_[group].layers)
      std::memcpy(at(layer, targets[i], bytes), at(layer, sources[i], bytes), bytes);
  }
}

void KvStore::read(std::int32_t group, std::span<const std::int32_t> blocks, std::span<std::uint8_t> bytes) const {
  check(group, blocks);
  const std::size_t layer_bytes = layer_block_bytes(groups_[group]);
  if (bytes.size() != blocks.size() * block_bytes(group))
    refuse("the bytes of the blocks", static_cast<std::int64_t>(bytes.size()),
           std::to_string(blocks.size() * block_bytes(group)));
  std::uint8_t* to = bytes.data();
  for (const std::int32_t block : blocks) {
    for (const std::int32_t layer : groups_[group].layers) {
      std::memcpy(to, at(layer, block, layer_bytes), layer_bytes);
      to += layer_bytes;
    }
  }
}

void KvStore::write(std::int32_t group, std::span<const std::int32_t> blocks, std::span<const std::uint8_t> bytes) {
  check(group, blocks);
  const std::size_t layer_bytes = layer_block_bytes(groups_[group]);
  if (bytes.size() != blocks.size() * block_bytes(group))
    refuse("the bytes of the blocks", static_cast<std::int64_t>(bytes.size()),
           std::to_string(blocks.size() * block_bytes(group)));
  const std::uint8_t* from = bytes.data();
  for (const std::int32_t block : blocks) {
    for (const std::int32_t layer : groups_[group].layers) {
      std::memcpy(at(layer, block, layer_bytes), from, layer_bytes);
      from += layer_bytes;
    }
  }
}

std::size_t KvStore::layer_block_bytes(const KvGroup& group) const {
  return static_cast<std::size_t>(group.num_kv_heads) *
         static_cast<std::size_t>(kv_head_bytes(format_, block_size_, group.head_dim));
}

void KvStore::check(std::int32_t group, std::span<const std::int32_t> blocks) const {
  if (group < 0 || group >= num_groups()) refuse("a group", group, "in 0.." + std::to_string(num_groups() - 1));
  for (const std::int32_t block : blocks) {
    if (block < 0 || block >= groups_[group].num_blocks)
      refuse("a block", block, "in 0.." + std::to_string(groups_[group].num_blocks - 1));
  }
}

std::uint8_t* KvStore::at(std::int32_t layer, std::int32_t block, std::size_t bytes) const {
  return static_cast<std::uint8_t*>(layers_[layer].cache.data) + static_cast<std::size_t>(block) * bytes;
}

}  // namespace octavo
