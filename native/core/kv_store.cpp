#include "core/kv_store.h"

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
    : block_size_(block_size), groups_(std::move(groups)) {
  if (block_size != 8 && block_size != 16 && block_size != 32) refuse("block_size", block_size, "8, 16 or 32");
  const auto layer_bytes = [&](const KvGroup& group) {
    return static_cast<std::size_t>(group.num_blocks) * group.num_kv_heads *
           static_cast<std::size_t>(kv_head_bytes(format, block_size, group.head_dim));
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

}  // namespace octavo
