// Where things lie in a packed panel of integer weights; written by core/packing, read by the linear kernels.
//
// A block of 32 rows of K starts with vectors of 64 bytes in which byte 4 * column + k % 4 belongs to that column
// (`vpdpbusd` wants four consecutive k per 32-bit lane). Vector j holds k = 4 j .. 4 j + 3: as bytes in kU8 (8
// vectors), in the low nibble in kU4, whose high nibble holds k + 16 (4 vectors). Scales, and mins where a format has
// them, are 16 fp16 as stored. They stand before the levels of their block, so that a panel is read as one stream;
// symmetric formats pair the scales of two blocks, so that levels stay 64-byte aligned. In a panel with an odd number
// of blocks the last pair has no second levels.
#pragma once

#include <stdint.h>

namespace octavo {

inline constexpr int64_t kHalvesBytes = 32;    // 16 fp16
inline constexpr int64_t kU4LevelBytes = 256;  // a block's levels
inline constexpr int64_t kU8LevelBytes = 512;

// kU4 with mins: [scales][mins][levels]
inline constexpr int64_t kU4MinBlockBytes = 2 * kHalvesBytes + kU4LevelBytes;

// kU8 and symmetric kU4: [scales of 2 p][scales of 2 p + 1][levels of 2 p][levels of 2 p + 1]
constexpr int64_t pair_scales_offset(int64_t block, int64_t level_bytes) {
  return block / 2 * (2 * kHalvesBytes + 2 * level_bytes) + block % 2 * kHalvesBytes;
}
constexpr int64_t pair_levels_offset(int64_t block, int64_t level_bytes) {
  return block / 2 * (2 * kHalvesBytes + 2 * level_bytes) + 2 * kHalvesBytes + block % 2 * level_bytes;
}
constexpr int64_t paired_panel_bytes(int64_t blocks, int64_t level_bytes) {
  return (blocks + 1) / 2 * 2 * kHalvesBytes + blocks * level_bytes;
}

}  // namespace octavo
