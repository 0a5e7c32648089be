// Passes over a row of logits: what the sampler (core/sampler.cpp) decides with. Arithmetic version 1.
#include "kernels/kernels.h"
#include "kernels/ops.h"
#include "kernels/simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// The first `count` values at p, `fill` in the other lanes.
F16 load_part(const float* p, int64_t count, float fill) {
  if (count >= kLanes) return load(p);
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = i < count ? p[i] : fill;
  return load(values);
}

// Lane-wise count of values at indices begin..end-1 that are above (or, with `or_equal`, at least) `value`. float32
// counts exactly below 2^24 per lane.
template <bool or_equal>
int64_t count_above(const float* x, int64_t begin, int64_t end, float value) {
  const F16 bound = splat(value), one = splat(1.0f);
  F16 counts = zero();
  for (int64_t i = begin; i < end; i += kLanes) {
    const F16 v = load_part(x + i, end - i, -INFINITY);
    F16 hit = or_equal ? where_less(v, bound, zero(), one) : where_less(bound, v, one, zero());
    if (end - i < kLanes) hit = first_lanes(static_cast<int>(end - i), hit, zero());
    counts = add(counts, hit);
  }
  float lanes[kLanes];
  store(lanes, counts);
  int64_t total = 0;
  for (float lane : lanes) total += static_cast<int64_t>(lane);
  return total;
}

int first_bit(uint32_t mask) { return __builtin_ctz(mask); }

}  // namespace

void scan_row(const float* x, int64_t n, float* group_max, RowScan* result) {
  const F16 lowest = splat(-INFINITY), biggest_finite = splat(__FLT_MAX__), smallest_finite = splat(-__FLT_MAX__);
  F16 nan_trace = zero();
  F16 best = lowest;
  for (int64_t chunk = 0; chunk * kSampleChunk < n; ++chunk) {
    const int64_t begin = chunk * kSampleChunk;
    const int64_t end = begin + kSampleChunk < n ? begin + kSampleChunk : n;
    F16 group = lowest;
    for (int64_t i = begin; i < end; i += kLanes) {
      const F16 v = load_part(x + i, end - i, -INFINITY);
      group = max(v, group);  // the second operand where v is NaN
      // Finite or NaN, so that times zero leaves only a NaN behind.
      nan_trace = fma(max(smallest_finite, min(biggest_finite, v)), zero(), nan_trace);
    }
    store(group_max + chunk * kLanes, group);
    best = max(group, best);
  }
  result->max = reduce_max(best);
  const float trace = reduce_add(nan_trace);
  result->has_nan = trace != trace;
  result->argmax = 0;

  const F16 bound = splat(result->max);
  for (int64_t chunk = 0; chunk * kSampleChunk < n; ++chunk) {
    if (mask_at_least(load(group_max + chunk * kLanes), bound) == 0) continue;
    const int64_t begin = chunk * kSampleChunk;
    const int64_t end = begin + kSampleChunk < n ? begin + kSampleChunk : n;
    for (int64_t i = begin; i < end; i += kLanes) {
      const uint32_t mask = mask_at_least(load_part(x + i, end - i, -INFINITY), bound);
      if (mask == 0) continue;
      const int64_t index = i + first_bit(mask);
      result->argmax = index < n ? static_cast<int32_t>(index) : 0;
      return;
    }
  }
}

double exponentials(const float* x, int64_t n, float max, float scale, float* out, double* chunk_sums) {
  const F16 shift = splat(max), factor = splat(scale);
  double total = 0.0;
  for (int64_t begin = 0, chunk = 0; begin < n; begin += kSampleChunk, ++chunk) {
    const int64_t end = begin + kSampleChunk < n ? begin + kSampleChunk : n;
    F16 sums = zero();
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const F16 e = exp(mul(sub(load(x + i), shift), factor));
      if (out != nullptr) store(out + i, e);
      sums = add(sums, e);
    }
    if (i < end) {
      const F16 e = exp(mul(sub(load_part(x + i, end - i, -INFINITY), shift), factor));
      float values[kLanes];
      store(values, e);
      if (out != nullptr) memcpy(out + i, values, static_cast<size_t>(end - i) * sizeof(float));
      sums = add(sums, e);
    }
    const double sum = static_cast<double>(reduce_add(sums));
    if (chunk_sums != nullptr) chunk_sums[chunk] = sum;
    total += sum;
  }
  return total;
}

int64_t collect(const float* x, int64_t n, float threshold, int32_t* indices) {
  const F16 bound = splat(threshold);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    uint32_t mask = mask_at_least(load_part(x + i, n - i, -INFINITY), bound);
    if (n - i < kLanes) mask &= (1u << (n - i)) - 1u;
    for (; mask != 0; mask &= mask - 1) indices[count++] = static_cast<int32_t>(i + first_bit(mask));
  }
  return count;
}

int64_t rank(const float* x, int64_t n, int64_t index) {
  return 1 + count_above<true>(x, 0, index, x[index]) + count_above<false>(x, index + 1, n, x[index]);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
