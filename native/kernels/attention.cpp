// Paged attention: writing K and V of one token, and softmax(q k) v of a few tokens of one row over one KV head.
//
// The arithmetic of one query row, which is all that decides its bits:
//  - positions are cut into splits at absolute multiples of kKvSplit and into groups at multiples of 16;
//  - a score is scale * (sum over even head dimensions + sum over odd ones), each an fma chain in ascending order;
//  - within a split: the maximum, e^(score - maximum), their sum lane by lane over the groups and then by the tree of
//  lanes, and
//    the weighted sum of V, an fma chain over ascending positions;
//  - splits are merged in ascending order, as if each had been computed elsewhere; then one division.
// Rows computed together share loads and nothing else. K, V and the block table outside a row's visible positions are
// not read into its result: scores there are replaced by -inf, and V is skipped.
#include "kernels/kernels.h"
#include "kernels/ops.h"
#include "kernels/pairs.h"
#include "kernels/simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// Rows and vectors of V whose running sums fit the registers.
#if defined(OCTAVO_ISA_avx512)
inline constexpr int kTileRows = 6;
inline constexpr int kTileVectors = 4;
#else
inline constexpr int kTileRows = 3;
inline constexpr int kTileVectors = 2;
#endif
inline constexpr int64_t kMostRows = 64;  // rows whose state is kept at once

// One query row: a token and one of the heads that read this KV head. It sees positions begin..end-1.
struct Row {
  const float* q;
  float* out;  // the weighted sum so far; divided by `sum` at the end
  int64_t begin, end;
  float max, sum;
  bool started;
};

inline void set_element(float* p, float x) { *p = x; }
inline void set_element(uint16_t* p, float x) { *p = float_to_bf16(x); }
inline F16 load_values(const float* p) { return load(p); }
inline F16 load_values(const uint16_t* p) { return load_bf16(p); }

// Addresses in one KV head's part of a layer's cache.
template <class T>
struct Head {
  const T* data;
  const int32_t* table;
  int64_t block_stride, half_stride, head_dim;
  int block_shift;

  Head(const AttendArgs& a)
      : table(a.block_table),
        half_stride(static_cast<int64_t>(a.cache.block_size) * a.cache.head_dim),
        head_dim(a.cache.head_dim),
        block_shift(__builtin_ctz(static_cast<unsigned>(a.cache.block_size))) {
    block_stride = a.cache.num_kv_heads * 2 * half_stride;
    data = static_cast<const T*>(a.cache.data) + a.kv_head * 2 * half_stride;
  }
  int64_t offset(int64_t position) const { return position & ((int64_t{1} << block_shift) - 1); }
  // K of the positions from `position` on, within their block: [head_dim / 2][block_size][2].
  const T* k(int64_t position) const {
    return data + table[position >> block_shift] * block_stride + 2 * offset(position);
  }
  const T* v(int64_t position) const {
    return data + table[position >> block_shift] * block_stride + half_stride + offset(position) * head_dim;
  }
};

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Scores of R rows against the 16 positions whose K lies at lo (8) and hi (8); `step` elements from one dimension pair
// to the next. Meanwhile fetches what is read next: the K at next_k, with the same step, and the 16 rows of V at
// next_v. Block tables jump, and the hardware cannot guess where.
template <int R, bool kTogether, class T>
inline void score_group(const Row* rows, const T* lo, const T* hi, const T* next_k, const T* next_v, int64_t step,
                        int64_t pairs, F16 scale, F16* scores) {
  F16 even[R], odd[R];
  const float* q[R];
  for (int r = 0; r < R; ++r) {
    even[r] = odd[r] = zero();
    q[r] = rows[r].q;
  }
  for (int64_t i = 0; i < pairs; ++i) {
    Pairs k;
    if constexpr (kTogether)
      k = load_pairs(lo);
    else
      k = load_pairs(lo, hi);
    lo += step;
    hi += step;
    __builtin_prefetch(next_k + i * step);
    __builtin_prefetch(next_v + i * 2 * kLanes, 0, 2);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      even[r] = fma(splat(q[r][2 * i]), k.first, even[r]);
      odd[r] = fma(splat(q[r][2 * i + 1]), k.second, odd[r]);
    }
  }
  for (int r = 0; r < R; ++r) scores[r] = mul(add(even[r], odd[r]), scale);
}

// out = (old sums scaled by `keep`) + (sums of this split scaled by `take`), for D vectors of V and R rows; plainly the
// sums of this split for rows that start here.
template <int R, int D, class T>
inline void add_values(const Head<T>& head, Row* rows, int64_t split, int64_t begin, int64_t end, int64_t column,
                       const float (*weights)[kKvSplit], const float* keep, const float* take) {
  F16 sums[R][D];
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D; ++d) sums[r][d] = zero();
  // All rows see the middle; at the edges each sees a part. Rows are in ascending order of begin and end.
  int64_t middle_begin = larger(begin, rows[R - 1].begin);
  int64_t middle_end = smaller(end, rows[0].end);
  if (middle_begin >= middle_end) middle_begin = middle_end = end;
  const auto edge = [&](int64_t from, int64_t to) {
    for (int64_t j = from; j < to; ++j) {
      const T* v = head.v(j) + column;
      for (int r = 0; r < R; ++r) {
        if (j < rows[r].begin || j >= rows[r].end) continue;
        const F16 w = splat(weights[r][j - split]);
        for (int d = 0; d < D; ++d) sums[r][d] = fma(w, load_values(v + d * kLanes), sums[r][d]);
      }
    }
  };
  edge(begin, middle_begin);
  for (int64_t j = middle_begin; j < middle_end; ++j) {
    const T* p = head.v(j) + column;
    F16 v[D];
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) v[d] = load_values(p + d * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const F16 w = splat(weights[r][j - split]);
#pragma GCC unroll 4
      for (int d = 0; d < D; ++d) sums[r][d] = fma(w, v[d], sums[r][d]);
    }
  }
  edge(middle_end, end);
  for (int r = 0; r < R; ++r) {
    float* out = rows[r].out + column;
    for (int d = 0; d < D; ++d) {
      F16 sum = sums[r][d];
      if (rows[r].started) sum = fma(load(out + d * kLanes), splat(keep[r]), mul(sum, splat(take[r])));
      store(out + d * kLanes, sum);
    }
  }
}

template <int R, class T, int D = kTileVectors>
inline void add_columns(const Head<T>& head, Row* rows, int64_t split, int64_t begin, int64_t end, int64_t column,
                        const float (*weights)[kKvSplit], const float* keep, const float* take) {
  for (; column + D * kLanes <= head.head_dim; column += D * kLanes)
    add_values<R, D>(head, rows, split, begin, end, column, weights, keep, take);
  if constexpr (D > 1) add_columns<R, T, D / 2>(head, rows, split, begin, end, column, weights, keep, take);
}

inline float exp_one(float x) {
  float t[kLanes];
  store(t, exp(splat(x)));
  return t[0];
}

// One split of R rows, each of which sees some of its positions.
template <int R, class T>
inline void attend_split(const Head<T>& head, Row* rows, int64_t split, F16 scale) {
  const int64_t begin = larger(split, rows[0].begin);
  const int64_t end = smaller(split + kKvSplit, rows[R - 1].end);
  const int64_t first_group = begin / kLanes, last_group = (end - 1) / kLanes;
  const int64_t block_size = int64_t{1} << head.block_shift;
  const F16 hidden = splat(-HUGE_VALF);
  alignas(64) float weights[R][kKvSplit];

  F16 max_lanes[R];
  for (int r = 0; r < R; ++r) max_lanes[r] = hidden;
  for (int64_t group = first_group; group <= last_group; ++group) {
    const int64_t position = group * kLanes;
    F16 scores[R];
    if (block_size >= kLanes) {
      const T* k = head.k(position);
      const T* next = position + kLanes < rows[R - 1].end ? head.k(position + kLanes) : k;
      score_group<R, true>(rows, k, k + kLanes, next, head.v(position), 2 * block_size, head.head_dim / 2, scale,
                           scores);
    } else {
      // Two half groups in blocks of eight. A half that nobody sees may have no block: the other stands in, and is
      // masked.
      const bool has_lo = begin<position + 8, has_hi = end> position + 8;
      const T* lo = head.k(has_lo ? position : position + 8);
      const T* hi = has_hi ? head.k(position + 8) : lo;
      score_group<R, false>(rows, lo, hi, hi, lo, 2 * block_size, head.head_dim / 2, scale, scores);
    }
    for (int r = 0; r < R; ++r) {
      const int64_t visible_from = rows[r].begin - position, visible_to = rows[r].end - position;
      if (visible_to < kLanes) scores[r] = first_lanes(static_cast<int>(larger(visible_to, 0)), scores[r], hidden);
      if (visible_from > 0) scores[r] = first_lanes(static_cast<int>(smaller(visible_from, kLanes)), hidden, scores[r]);
      max_lanes[r] = max(max_lanes[r], scores[r]);
      store(weights[r] + (position - split), scores[r]);
    }
  }

  float keep[R], take[R];
  for (int r = 0; r < R; ++r) {
    const float split_max = reduce_max(max_lanes[r]);
    F16 sum_lanes = zero();
    for (int64_t group = first_group; group <= last_group; ++group) {
      float* w = weights[r] + (group * kLanes - split);
      const F16 e = exp(sub(load(w), splat(split_max)));
      sum_lanes = add(sum_lanes, e);
      store(w, e);
    }
    const float split_sum = reduce_add(sum_lanes);
    if (rows[r].started) {
      const float merged = rows[r].max > split_max ? rows[r].max : split_max;
      keep[r] = exp_one(rows[r].max - merged);
      take[r] = exp_one(split_max - merged);
      rows[r].sum = fmaf(rows[r].sum, keep[r], split_sum * take[r]);
      rows[r].max = merged;
    } else {
      keep[r] = take[r] = 0.0f;
      rows[r].sum = split_sum;
      rows[r].max = split_max;
    }
  }
  add_columns<R>(head, rows, split, begin, end, 0, weights, keep, take);
  for (int r = 0; r < R; ++r) rows[r].started = true;
}

template <int R, class T>
inline void attend_up_to(int64_t count, const Head<T>& head, Row* rows, int64_t split, F16 scale) {
  if constexpr (R > 1) {
    if (count < R) return attend_up_to<R - 1>(count, head, rows, split, scale);
  }
  attend_split<R>(head, rows, split, scale);
}

template <class T>
inline void attend_head(const AttendArgs& a) {
  const Head<T> head(a);
  const int64_t heads_per_kv = a.num_heads / a.cache.num_kv_heads;
  const int64_t total = (a.token_end - a.token_begin) * heads_per_kv;
  const F16 scale = splat(a.scale);
  for (int64_t first = 0; first < total; first += kMostRows) {
    Row rows[kMostRows];
    const int64_t count = smaller(kMostRows, total - first);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = a.token_begin + (first + i) / heads_per_kv;
      const int64_t query_head = a.kv_head * heads_per_kv + (first + i) % heads_per_kv;
      const int64_t at = (token * a.num_heads + query_head) * head.head_dim;
      const int64_t position = a.positions[token];
      const int64_t begin = a.window > 0 ? larger(0, position - a.window + 1) : 0;
      rows[i] = {a.q + at, a.out + at, begin, position + 1, 0.0f, 0.0f, false};
    }
    for (int64_t split = rows[0].begin / kKvSplit * kKvSplit; split < rows[count - 1].end; split += kKvSplit) {
      int64_t i = 0, last = count;
      while (rows[i].end <= split) ++i;
      while (rows[last - 1].begin >= split + kKvSplit) --last;
      for (; i < last; i += kTileRows)
        attend_up_to<kTileRows>(smaller(kTileRows, last - i), head, rows + i, split, scale);
    }
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; d < head.head_dim; d += kLanes)
        store(rows[i].out + d, div(load(rows[i].out + d), splat(rows[i].sum)));
  }
}

template <class T>
inline void write_token(const KvCache& cache, const float* k, const float* v, int32_t block, int32_t offset) {
  const int64_t half = static_cast<int64_t>(cache.block_size) * cache.head_dim;
  T* out = static_cast<T*>(cache.data) + block * (cache.num_kv_heads * 2 * half);
  for (int32_t h = 0; h < cache.num_kv_heads; ++h) {
    T* pair = out + 2 * offset;
    for (int32_t d = 0; d < cache.head_dim; d += 2, pair += 2 * cache.block_size) {
      set_element(pair, k[d]);
      set_element(pair + 1, k[d + 1]);
    }
    T* row = out + half + static_cast<int64_t>(offset) * cache.head_dim;
    for (int32_t d = 0; d < cache.head_dim; ++d) set_element(row + d, v[d]);
    k += cache.head_dim;
    v += cache.head_dim;
    out += 2 * half;
  }
}

}  // namespace

void kv_write(const KvCache& cache, const float* k, const float* v, int32_t block, int32_t offset) {
  if (cache.format == KvFormat::kBF16)
    write_token<uint16_t>(cache, k, v, block, offset);
  else
    write_token<float>(cache, k, v, block, offset);
}

void attend(const AttendArgs& args) {
  if (args.cache.format == KvFormat::kBF16)
    attend_head<uint16_t>(args);
  else
    attend_head<float>(args);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
