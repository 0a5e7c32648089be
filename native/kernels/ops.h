// Declarations of one instruction set's kernels, defined in linear.cpp, elementwise.cpp, attention.cpp and
// sampling.cpp. Meanings are in kernels.h.
#pragma once

#include "kernels/kernels.h"

namespace octavo {
namespace OCTAVO_ISA {

void quantize_row(const float* x, int64_t k, QuantBlock* out);
void to_bf16_row(const float* x, int64_t k, uint16_t* out);
void linear(const LinearArgs& args, int64_t panel_begin, int64_t panel_end);

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* y);
void add_rows(const float* a, const float* b, int64_t n, float* y);
void silu_mul(const float* gate, const float* up, int64_t n, float* y);
void silu_mul_panels(const float* x, int64_t panels, float* y);
void rope(const float* x, int64_t heads, int64_t head_dim, int64_t rotated_dim, bool interleaved, const float* cos,
          const float* sin, float* y);

void kv_write(const KvCache& cache, const float* k, const float* v, int32_t block, int32_t offset);
void attend(const AttendArgs& args);
void merge_splits(const float* partials, int64_t splits, int64_t stride, int64_t head_dim, float* out);

void scan_row(const float* x, int64_t n, float* group_max, RowScan* result);
double exponentials(const float* x, int64_t n, float max, float scale, float* out, double* chunk_sums);
int64_t collect(const float* x, int64_t n, float threshold, int32_t* indices);
int64_t rank(const float* x, int64_t n, int64_t index);

}  // namespace OCTAVO_ISA
}  // namespace octavo
