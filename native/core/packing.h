// From stored weight matrices to packed panels, and back to single rows. Knows formats and layouts, not files, threads
// or arenas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/kernels.h"

namespace octavo {

// Formats of octavo.quant.Format: row-major [n, k], blocks along k.
enum class StoredFormat : int32_t { kF32, kF16, kBF16, kQ8_0, kQ4_0, kQ4_1 };

// The format of that name ("f32", "q4_1", ...). Throws std::invalid_argument.
StoredFormat stored_format(const std::string& name);

// Weights per block: 32 for quantized formats, else 1.
int64_t stored_block(StoredFormat format);

// Bytes of one stored row of k weights, k a multiple of stored_block.
int64_t stored_row_bytes(StoredFormat format, int64_t k);

// How a stored [n, k] matrix is packed, with `data` null. Quantized formats stay as stored; others become float32 if
// `float32` is set, else bfloat16 (rounded to nearest even). Throws std::invalid_argument unless n > 0, k > 0, k is
// a multiple of stored_block and n * k is at most 2^48.
PackedMatrix describe_packed(StoredFormat format, bool float32, int64_t n, int64_t k);

inline int64_t num_panels(const PackedMatrix& matrix) { return (matrix.n + kPanel - 1) / kPanel; }
inline size_t packed_bytes(const PackedMatrix& matrix) {
  return static_cast<size_t>(num_panels(matrix) * matrix.panel_bytes);
}

// Packs panels panel_begin..panel_end-1 of `raw` [n, k] into `data`, the beginning of the whole packed matrix:
// packed_bytes long and 64-byte aligned. `shape` is of describe_packed. Writes every byte of these panels and no other,
// so panels can be split over threads. The caller checks that raw has n * stored_row_bytes bytes; it needs no
// alignment.
void pack_panels(const PackedMatrix& shape, StoredFormat format, const uint8_t* raw, int64_t panel_begin,
                 int64_t panel_end, uint8_t* data);

// Row `row` (0..n-1, checked by the caller) as float32 [k]: scale * level and + min, each rounded once, as octavo.quant
// dequantizes.
void unpack_row(const PackedMatrix& matrix, int64_t row, float* out);

}  // namespace octavo
