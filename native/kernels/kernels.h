// The kernel table: what the core calls, once per instruction set. Plain data and function pointers only, because this
// header is seen by code compiled for different instruction sets. Kernels know tiles of work; threads and order are the
// core's (core/program).
//
// Reproducibility: an output element is computed in one fixed order that depends neither on how many rows or panels a
// call covers nor on the instruction set. Rows never influence each other.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

inline constexpr int kPanel = 16;       // output columns per packed panel: the lanes of a vector
inline constexpr int kQuantBlock = 32;  // weights or activations that share a scale
inline constexpr int kKvSplit = 256;    // attention merges partial results at these absolute token boundaries

// Packed weight matrices. N in lanes, K in order; N is padded to a multiple of kPanel with zero columns. Exact places:
// panels.h.
enum class Packing : int32_t {
  kF32 = 0,   // panel: k x 16 float
  kBF16 = 1,  // panel: k/2 x 16 x 2 bf16 (k odd: padded with zero)
  kU4 = 2,    // panel: per 32-block 16 x 16 bytes of levels 0..15, scales and mins: w = scale * level + min
  kU8 = 3,    // panel: per 32-block levels q + 128, scales: w = scale * (level - 128)
};

struct PackedMatrix {
  Packing packing;
  int32_t symmetric;  // kU4: 1 when every min is -8 * scale (Q4_0)
  int64_t n, k;
  int64_t panel_bytes;  // from one panel of 16 columns to the next, a multiple of 64
  const uint8_t* data;  // ceil(n / 16) panels, 64-byte aligned
};

// 32 activations in 8 bits: x is about scale * values, scale = absmax / 127, rounded to nearest even. A block whose
// absmax is below 2^-100 is all zero; one that holds NaN or infinity has scale and sum NaN, so that every product with
// it is NaN. One stream per row, because a tile of rows then needs one pointer per row.
struct QuantBlock {
  float scale;
  float sum;       // scale * sum(values), the factor of the weights' min
  int32_t offset;  // -128 * sum(values), what remains of weights stored with an offset of 128
  int8_t values[kQuantBlock];
};

// Activations prepared for a packing, by `quantize_row` for kU4 and kU8, by `to_bf16_row` for kBF16, as they are for
// kF32.
struct Activations {
  int64_t rows, k;
  const void* values;  // QuantBlock [rows, k / 32], uint16_t [rows, k] or float [rows, k]
};

struct LinearArgs {
  PackedMatrix weight;
  Activations input;
  const float* bias;  // [n] or null
  float* out;         // [rows, out_stride]
  int64_t out_stride;
};

enum class KvFormat : int32_t { kF32 = 0, kBF16 = 1, kI8 = 2 };

// One KV head's block of `block_size` tokens: K, then V, contiguous.
//   kF32   K [head_dim / 2][block_size][2], so that 16 tokens lie in lanes; V [block_size][head_dim]
//   kBF16  K as above; V [block_size / 2][head_dim][2], so that pairs of tokens lie together
//   kI8    both as kBF16; then the scales of K and those of V, float [2][block_size]: a value is its token's scale
//   times
//          a level in -127..127
struct KvCache {
  KvFormat format;
  int32_t block_size;
  int32_t num_kv_heads;
  int32_t head_dim;
  void* data;  // one layer: [num_blocks][num_kv_heads][kv_head_bytes]
};

// Bytes of one KV head's block, a multiple of 64.
static constexpr int64_t kv_head_bytes(KvFormat format, int64_t block_size, int64_t head_dim) {
  const int64_t values = 2 * block_size * head_dim;
  switch (format) {
    case KvFormat::kF32:
      return 4 * values;
    case KvFormat::kBF16:
      return 2 * values;
    case KvFormat::kI8:
      return values + 2 * block_size * static_cast<int64_t>(sizeof(float));
  }
  return 0;
}

struct AttendArgs {
  KvCache cache;
  const float* q;  // [tokens, num_heads * head_dim]
  float* out;      // same shape
  int32_t num_heads;
  float scale;
  int32_t window;                  // 0: full
  const int32_t* positions;        // [tokens]
  const int32_t* block_table;      // of the row that these tokens belong to
  int64_t token_begin, token_end;  // consecutive tokens of one row
  int32_t kv_head;
  // Null for all of it. Else only the split of the context that begins at position `split` is computed, not into `out`
  // but into one partial result for each token and head of the KV head: attend_partial_size(head_dim) floats, for
  // `merge_splits`.
  float* partials = nullptr;
  int32_t split = 0;
};

// A partial result: the weighted sum of V, then maximum, sum of weights, and 1, or 0 when the row sees nothing of the
// split.
static constexpr int64_t attend_partial_size(int64_t head_dim) { return head_dim + kPanel; }

inline constexpr int kSampleChunk = 1024;  // the sampling kernels scan and sum a row in chunks of this many values

// What one pass over a row of logits tells.
struct RowScan {
  float max;       // of all values but NaN; -inf when there is none
  int32_t argmax;  // the lowest index that holds it; 0 when there is none
  bool has_nan;
};

struct Kernels {
  const char* name;

  // linear
  void (*quantize_row)(const float* x, int64_t k, QuantBlock* out);
  void (*to_bf16_row)(const float* x, int64_t k, uint16_t* out);
  void (*linear)(const LinearArgs& args, int64_t panel_begin, int64_t panel_end);

  // elementwise, one row (or `n` elements) at a time
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* y);
  void (*add)(const float* a, const float* b, int64_t n, float* y);
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* y);
  // The same for x [panels][2][16], gate and up in turn, and y [panels * 16].
  void (*silu_mul_panels)(const float* x, int64_t panels, float* y);
  // cos and sin [rotated_dim / 2] of the row's position
  void (*rope)(const float* x, int64_t heads, int64_t head_dim, int64_t rotated_dim, bool interleaved, const float* cos,
               const float* sin, float* y);

  // attention
  void (*kv_write)(const KvCache& cache, const float* k, const float* v, int32_t block, int32_t offset);
  void (*attend)(const AttendArgs& args);
  // Merges partial results of one token and head, `stride` floats from one split to the next, in ascending order: out
  // [head_dim] gets the bits that one call for all splits gives. At least one split is seen.
  void (*merge_splits)(const float* partials, int64_t splits, int64_t stride, int64_t head_dim, float* out);

  // sampling, one row of n logits at a time
  // group_max [ceil(n / kSampleChunk) * 16]: element 16 c + i is the maximum of chunk c's values at indices i
  // modulo 16.
  void (*scan_row)(const float* x, int64_t n, float* group_max, RowScan* result);
  // out[i] = e^((x[i] - max) * scale), or nothing when out is null, and their sum: within a chunk in float32, lane by
  // lane and then by the tree of lanes; over the chunks, ascending, in float64. chunk_sums [ceil(n / kSampleChunk)] or
  // null.
  double (*exponentials)(const float* x, int64_t n, float max, float scale, float* out, double* chunk_sums);
  // Indices of the values >= threshold, ascending; returns how many.
  int64_t (*collect)(const float* x, int64_t n, float threshold, int32_t* indices);
  // 1 + the number of values that come before x[index] in descending order, ties in ascending order of index. No NaN.
  int64_t (*rank)(const float* x, int64_t n, int64_t index);
};

namespace portable {
const Kernels* kernels();
}
namespace avx2 {
const Kernels* kernels();
}
namespace avx512 {
const Kernels* kernels();
}

}  // namespace octavo
