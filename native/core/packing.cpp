#include "core/packing.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "kernels/half.h"
#include "kernels/panels.h"

namespace octavo {
namespace {

struct FormatTraits {
  const char* name;
  int64_t block;
  int64_t block_bytes;
};

// Indexed by StoredFormat. Q4_0: fp16 scale, 16 bytes; Q4_1: fp16 scale, fp16 min, 16 bytes; Q8_0: fp16 scale, 32 int8.
constexpr std::array<FormatTraits, 6> kFormats = {{
    {"f32", 1, 4},
    {"f16", 1, 2},
    {"bf16", 1, 2},
    {"q8_0", 32, 34},
    {"q4_0", 32, 18},
    {"q4_1", 32, 20},
}};

constexpr int64_t kMaxElements = int64_t{1} << 48;  // keeps byte counts far from overflow

const FormatTraits& traits(StoredFormat format) { return kFormats[static_cast<size_t>(format)]; }

template <class T>
T read(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// The stored rows of one panel; columns from `count` on are padding.
struct Rows {
  std::array<const uint8_t*, kPanel> at;
  int count;
};

Rows rows_of_panel(const PackedMatrix& shape, StoredFormat format, const uint8_t* raw, int64_t panel) {
  const int64_t row_bytes = stored_row_bytes(format, shape.k);
  const int64_t first = panel * kPanel;
  Rows rows{};
  rows.count = static_cast<int>(std::min<int64_t>(kPanel, shape.n - first));
  for (int c = 0; c < rows.count; ++c) rows.at[c] = raw + (first + c) * row_bytes;
  return rows;
}

// One block of each column into the panel: 16-bit scales, optional mins, and 4-byte groups of levels with `flip`
// applied. Stored nibbles already pair k with k + 16, so kU4 is moved, not recoded.
template <int kGroups, bool kMins>
void pack_block(const Rows& rows, int64_t stored_offset, uint32_t flip, uint8_t* scales, uint8_t* levels) {
  for (int c = 0; c < rows.count; ++c) {
    const uint8_t* block = rows.at[c] + stored_offset;
    std::memcpy(scales + 2 * c, block, 2);
    if (kMins) std::memcpy(scales + kHalvesBytes + 2 * c, block + 2, 2);
    const uint8_t* stored = block + (kMins ? 4 : 2);
    for (int j = 0; j < kGroups; ++j) {
      const uint32_t group = read<uint32_t>(stored + 4 * j) ^ flip;
      std::memcpy(levels + 64 * j + 4 * c, &group, 4);
    }
  }
}

void pack_u4_min_panel(const Rows& rows, int64_t blocks, uint8_t* out) {
  if (rows.count < kPanel) std::memset(out, 0, blocks * kU4MinBlockBytes);
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t* block = out + b * kU4MinBlockBytes;
    pack_block<4, true>(rows, b * 20, 0, block, block + 2 * kHalvesBytes);
  }
}

template <int kGroups>
void pack_paired_panel(const Rows& rows, int64_t blocks, int64_t stored_block_bytes, uint32_t flip, uint8_t* out) {
  constexpr int64_t kLevelBytes = 64 * kGroups;
  if (rows.count < kPanel) std::memset(out, 0, paired_panel_bytes(blocks, kLevelBytes));
  for (int64_t b = 0; b < blocks; ++b) {
    pack_block<kGroups, false>(rows, b * stored_block_bytes, flip, out + pair_scales_offset(b, kLevelBytes),
                               out + pair_levels_offset(b, kLevelBytes));
  }
  // The scales that complete the last pair of an odd count.
  if (blocks % 2 == 1) std::memset(out + pair_scales_offset(blocks, kLevelBytes), 0, kHalvesBytes);
}

template <StoredFormat kFormat>
float element(const uint8_t* row, int64_t k) {
  if constexpr (kFormat == StoredFormat::kF32) return read<float>(row + 4 * k);
  if constexpr (kFormat == StoredFormat::kF16) return f16_to_float(read<uint16_t>(row + 2 * k));
  if constexpr (kFormat == StoredFormat::kBF16) return bf16_to_float(read<uint16_t>(row + 2 * k));
}

template <StoredFormat kFormat>
void pack_f32_panel(const Rows& rows, int64_t k, uint8_t* out) {
  for (int64_t i = 0; i < k; ++i) {
    float values[kPanel] = {};
    for (int c = 0; c < rows.count; ++c) values[c] = element<kFormat>(rows.at[c], i);
    std::memcpy(out + i * sizeof values, values, sizeof values);
  }
}

template <StoredFormat kFormat>
void pack_bf16_panel(const Rows& rows, int64_t k, uint8_t* out) {
  for (int64_t i = 0; i < k; i += 2) {
    uint16_t values[kPanel][2] = {};
    for (int c = 0; c < rows.count; ++c) {
      values[c][0] = float_to_bf16(element<kFormat>(rows.at[c], i));
      if (i + 1 < k) values[c][1] = float_to_bf16(element<kFormat>(rows.at[c], i + 1));
    }
    std::memcpy(out + i / 2 * sizeof values, values, sizeof values);
  }
}

template <StoredFormat kFormat>
void pack_float_panel(Packing packing, const Rows& rows, int64_t k, uint8_t* out) {
  if (packing == Packing::kF32) {
    pack_f32_panel<kFormat>(rows, k, out);
  } else {
    pack_bf16_panel<kFormat>(rows, k, out);
  }
}

float half_at(const uint8_t* halves, int64_t column) { return f16_to_float(read<uint16_t>(halves + 2 * column)); }

template <class Dequantize>
void unpack_u4(const uint8_t* levels, int64_t column, float* out, Dequantize dequantize) {
  for (int i = 0; i < kQuantBlock / 2; ++i) {
    const int pair = levels[i / 4 * 64 + column * 4 + i % 4];
    out[i] = dequantize(pair & 15);
    out[i + kQuantBlock / 2] = dequantize(pair >> 4);
  }
}

}  // namespace

StoredFormat stored_format(const std::string& name) {
  for (size_t i = 0; i < kFormats.size(); ++i) {
    if (name == kFormats[i].name) return static_cast<StoredFormat>(i);
  }
  throw std::invalid_argument("unknown tensor format '" + name + "'; known: f32, f16, bf16, q8_0, q4_0, q4_1");
}

int64_t stored_block(StoredFormat format) { return traits(format).block; }

int64_t stored_row_bytes(StoredFormat format, int64_t k) {
  return k / traits(format).block * traits(format).block_bytes;
}

PackedMatrix describe_packed(StoredFormat format, bool float32, int64_t n, int64_t k) {
  if (n <= 0 || k <= 0 || k % stored_block(format) != 0 || k > kMaxElements / n) {
    throw std::invalid_argument("a " + std::string(traits(format).name) + " matrix of " + std::to_string(n) + " x " +
                                std::to_string(k) + "; expected n > 0 and k a positive multiple of " +
                                std::to_string(stored_block(format)) + ", with n * k at most 2^48");
  }
  PackedMatrix matrix{};
  matrix.n = n;
  matrix.k = k;
  const int64_t blocks = k / kQuantBlock;
  switch (format) {
    case StoredFormat::kQ8_0:
      matrix.packing = Packing::kU8;
      matrix.symmetric = 1;
      matrix.panel_bytes = paired_panel_bytes(blocks, kU8LevelBytes);
      break;
    case StoredFormat::kQ4_0:
      matrix.packing = Packing::kU4;
      matrix.symmetric = 1;
      matrix.panel_bytes = paired_panel_bytes(blocks, kU4LevelBytes);
      break;
    case StoredFormat::kQ4_1:
      matrix.packing = Packing::kU4;
      matrix.panel_bytes = blocks * kU4MinBlockBytes;
      break;
    case StoredFormat::kF32:
    case StoredFormat::kF16:
    case StoredFormat::kBF16:
      matrix.packing = float32 ? Packing::kF32 : Packing::kBF16;
      matrix.panel_bytes = float32 ? k * kPanel * 4 : (k + 1) / 2 * kPanel * 4;
      break;
  }
  return matrix;
}

void pack_panels(const PackedMatrix& shape, StoredFormat format, const uint8_t* raw, int64_t panel_begin,
                 int64_t panel_end, uint8_t* data) {
  const int64_t blocks = shape.k / kQuantBlock;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const Rows rows = rows_of_panel(shape, format, raw, panel);
    uint8_t* out = data + panel * shape.panel_bytes;
    switch (format) {
      case StoredFormat::kQ8_0:
        pack_paired_panel<8>(rows, blocks, 34, 0x80808080u, out);
        break;
      case StoredFormat::kQ4_0:
        pack_paired_panel<4>(rows, blocks, 18, 0, out);
        break;
      case StoredFormat::kQ4_1:
        pack_u4_min_panel(rows, blocks, out);
        break;
      case StoredFormat::kF32:
        pack_float_panel<StoredFormat::kF32>(shape.packing, rows, shape.k, out);
        break;
      case StoredFormat::kF16:
        pack_float_panel<StoredFormat::kF16>(shape.packing, rows, shape.k, out);
        break;
      case StoredFormat::kBF16:
        pack_float_panel<StoredFormat::kBF16>(shape.packing, rows, shape.k, out);
        break;
    }
  }
}

void unpack_row(const PackedMatrix& matrix, int64_t row, float* out) {
  const uint8_t* panel = matrix.data + row / kPanel * matrix.panel_bytes;
  const int64_t column = row % kPanel;
  switch (matrix.packing) {
    case Packing::kF32:
      for (int64_t i = 0; i < matrix.k; ++i) out[i] = read<float>(panel + (i * kPanel + column) * 4);
      break;
    case Packing::kBF16:
      for (int64_t i = 0; i < matrix.k; ++i)
        out[i] = bf16_to_float(read<uint16_t>(panel + (i / 2 * kPanel + column) * 4 + i % 2 * 2));
      break;
    case Packing::kU4:
      for (int64_t b = 0; b < matrix.k / kQuantBlock; ++b) {
        if (matrix.symmetric) {
          const float scale = half_at(panel + pair_scales_offset(b, kU4LevelBytes), column);
          unpack_u4(panel + pair_levels_offset(b, kU4LevelBytes), column, out + b * kQuantBlock,
                    [=](int level) { return scale * static_cast<float>(level - 8); });
        } else {
          const uint8_t* block = panel + b * kU4MinBlockBytes;
          const float scale = half_at(block, column);
          const float min = half_at(block + kHalvesBytes, column);
          unpack_u4(block + 2 * kHalvesBytes, column, out + b * kQuantBlock,
                    [=](int level) { return scale * static_cast<float>(level) + min; });
        }
      }
      break;
    case Packing::kU8:
      for (int64_t b = 0; b < matrix.k / kQuantBlock; ++b) {
        const float scale = half_at(panel + pair_scales_offset(b, kU8LevelBytes), column);
        const uint8_t* levels = panel + pair_levels_offset(b, kU8LevelBytes) + column * 4;
        for (int i = 0; i < kQuantBlock; ++i) {
          out[b * kQuantBlock + i] = scale * static_cast<float>(levels[i / 4 * 64 + i % 4] - 128);
        }
      }
      break;
  }
}

}  // namespace octavo
