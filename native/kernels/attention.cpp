// Paged attention: writing K and V of one token, and softmax(q k) v of a few tokens of one row over one KV head.
//
// The arithmetic of one query row, which is all that decides its bits:
//  - positions are cut into splits at absolute multiples of kKvSplit and into groups at multiples of 16;
//  - a score is scale * (q k). In float32, q k is the sum over even head dimensions plus that over odd ones, each an
//    fma chain in ascending order. With bf16 K, q is rounded to bf16, and q k is the sum over even pairs of dimensions
//    plus that over odd pairs; a pair adds its second product, then its first, as vdpbf16ps does. With 8-bit K, q is
//    rounded to integers in steps of absmax / 32767, the sum is exact, and the scale of the token's K is multiplied
//    last;
//  - within a split: the maximum, the weights e^(score - maximum), and their sum lane by lane over the groups and then
//    by the tree of lanes;
//  - the weighted sum of V of a split is an fma chain over ascending positions. With bf16 V, weights are rounded to
//    bf16, and positions are added in pairs as above. With 8-bit V, weights times the scales of V are rounded to
//    integers in steps of their maximum / 32767, and the sum is exact;
//  - splits are merged in ascending order, as if each had been computed elsewhere; then one division.
// Rows computed together share loads and nothing else. K, V and the block table outside a row's visible positions are
// not read into its result: scores there are replaced by -inf, and V is skipped or replaced by zero.
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
inline constexpr int kTileRows = 4;
inline constexpr int kTileVectors = 2;
#endif
inline constexpr int64_t kMostRows = 64;      // rows whose state is kept at once
inline constexpr int64_t kMostHeadDim = 256;  // see core/kv_store.h
inline constexpr float kMostWord = 32767.0f;
inline constexpr float kMostByte = 127.0f;
inline constexpr float kSmallest = 0x1p-100f;  // below it steps and their inverses would leave the normal range

// What a cache of T is multiplied with: 16-bit integers, bf16, or float.
template <class T>
struct Cached;
template <>
struct Cached<int8_t> {
  static constexpr KvFormat kFormat = KvFormat::kI8;
  using Operand = int16_t;
};
template <>
struct Cached<uint16_t> {
  static constexpr KvFormat kFormat = KvFormat::kBF16;
  using Operand = uint16_t;
};
template <>
struct Cached<float> {
  static constexpr KvFormat kFormat = KvFormat::kF32;
  using Operand = float;
};
template <class T>
using Operand = typename Cached<T>::Operand;

// One query row: a token and one of the heads that read this KV head. It sees positions begin..end-1.
template <class T>
struct Row {
  const Operand<T>* q;
  float factor;  // from q k to score
  float* out;    // the weighted sum so far
  int64_t begin, end;
  float max, sum;
  bool started;
};

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// 16 floats of two places.
inline F16 load_halves(const float* lo, const float* hi) {
  float t[kLanes];
  memcpy(t, lo, sizeof(float) * 8);
  memcpy(t + 8, hi, sizeof(float) * 8);
  return load(t);
}

// Addresses in one KV head's part of a layer's cache.
template <class T>
struct Head {
  const char* data;
  const int32_t* table;
  int64_t head_bytes, block_bytes, half, head_dim;
  int block_shift;

  explicit Head(const AttendArgs& a)
      : table(a.block_table),
        head_bytes(kv_head_bytes(Cached<T>::kFormat, a.cache.block_size, a.cache.head_dim)),
        block_bytes(head_bytes * a.cache.num_kv_heads),
        half(static_cast<int64_t>(a.cache.block_size) * a.cache.head_dim),
        head_dim(a.cache.head_dim),
        block_shift(__builtin_ctz(static_cast<unsigned>(a.cache.block_size))) {
    data = static_cast<const char*>(a.cache.data) + a.kv_head * head_bytes;
  }
  int64_t block_size() const { return int64_t{1} << block_shift; }
  int64_t offset(int64_t position) const { return position & (block_size() - 1); }
  const T* block(int64_t position) const {
    return reinterpret_cast<const T*>(data + table[position >> block_shift] * block_bytes);
  }
  // K of the positions from `position` on, within their block: [head_dim / 2][block_size][2].
  const T* k(int64_t position) const { return block(position) + 2 * offset(position); }
  // V: one position, or where positions lie in pairs, the pair of which it is the first.
  const T* v(int64_t position) const { return block(position) + half + offset(position) * head_dim; }
  // Scales of K and of V.
  const float* scales(int64_t position, int which) const {
    return reinterpret_cast<const float*>(block(position) + 2 * half) + which * block_size() + offset(position);
  }
};

// Fetches K and V into the second level cache in the order in which they will be read, which block tables hide from the
// hardware: of each split the K of all groups, then their V. `kLead` bytes ahead at first, then as much as is read.
template <class T>
class Ahead {
 public:
  // K or V of a group: two streams of lines, or with `line` 0 one address again and again.
  struct Lines {
    const char *lo, *hi;
    int64_t line;

    void step() {
      __builtin_prefetch(lo, 0, 2);
      __builtin_prefetch(hi, 0, 2);
      lo += line;
      hi += line;
    }
  };

  // Nothing: for positions that are in the cache already.
  explicit Ahead(const Head<T>& head) : head_(head), steps_(0), begin_(0), end_(0), split_end_(0), position_(0) {}
  Ahead(const Head<T>& head, int64_t begin, int64_t end)
      : head_(head),
        steps_(head.half * kLanes / head.block_size() * sizeof(T) / (2 * kLine)),
        begin_(begin),
        end_(end) {
    enter_split(begin);
    for (int64_t fetched = 0; fetched < kLead; fetched += steps_ * 2 * kLine) {
      Lines lines = next();
      for (int64_t i = 0; i < steps_; ++i) lines.step();
    }
  }

  // How many steps the lines of a group take.
  int64_t steps() const { return steps_; }

  // What is to be fetched while the next group's K or V is read.
  Lines next() {
    if (position_ >= end_) return {reinterpret_cast<const char*>(this), reinterpret_cast<const char*>(this), 0};
    const Lines lines = lines_at(position_);
    position_ += kLanes;
    if (position_ >= split_end_) {
      if (values_)
        enter_split(split_end_);
      else
        position_ = split_begin_, values_ = true;
    }
    return lines;
  }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr int64_t kLead = 8192;

  void enter_split(int64_t position) {
    values_ = false;
    position_ = split_begin_ = position / kLanes * kLanes;
    split_end_ = smaller(end_, position / kKvSplit * kKvSplit + kKvSplit);
  }

  Lines lines_at(int64_t at) const {
    const int64_t half_bytes = values_ ? head_.half * static_cast<int64_t>(sizeof(T)) : 0;
    if (head_.block_size() < kLanes) {
      // Two blocks; one where the other lies before the window or behind the row.
      return {reinterpret_cast<const char*>(head_.block(larger(at, begin_))) + half_bytes,
              reinterpret_cast<const char*>(head_.block(smaller(at + 8, end_ - 1))) + half_bytes, kLine};
    }
    if constexpr (sizeof(T) == 1) __builtin_prefetch(head_.scales(at, values_ ? 1 : 0), 0, 2);
    const int64_t bytes = steps_ * 2 * kLine;
    // In larger blocks the K of a group does not lie together, but all of it is read no later.
    const char* lo = reinterpret_cast<const char*>(head_.block(at)) + half_bytes + bytes * (head_.offset(at) / kLanes);
    return {lo, lo + bytes / 2, kLine};
  }

  const Head<T>& head_;
  int64_t steps_, begin_, end_;
  int64_t split_begin_ = 0, split_end_, position_;
  bool values_ = false;
};

// q k of R rows and the 16 positions whose K lies at lo (8) and hi (8), times the rows' factors; `step` elements from
// one dimension pair to the next.
template <int R, bool kTogether>
inline void score_group(const Row<float>* rows, const float* lo, const float* hi, int64_t step, int64_t pairs,
                        Ahead<float>::Lines ahead, F16* scores) {
  F16 even[R], odd[R];
  const float* q[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    even[r] = odd[r] = zero();
    q[r] = rows[r].q;
  }
  for (int64_t i = 0; i < pairs; ++i) {
    const Pairs k = kTogether ? load_pairs(lo) : load_pairs(lo, hi);
    lo += step;
    hi += step;
    ahead.step();
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      even[r] = fma(splat(q[r][2 * i]), k.first, even[r]);
      odd[r] = fma(splat(q[r][2 * i + 1]), k.second, odd[r]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) scores[r] = mul(add(even[r], odd[r]), splat(rows[r].factor));
}

// Sums of pairs of words: exact for integers, in the order of `dot_bf16` for bf16.
inline I16 start(int16_t) { return zero_int(); }
inline F16 start(uint16_t) { return zero(); }
inline I16 dot(I16 sum, I16 a, I16 b) { return dot_words(sum, a, b); }
inline F16 dot(F16 sum, I16 a, I16 b) { return dot_bf16(sum, a, b); }
inline F16 as_float(I16 sum) { return to_float(sum); }
inline F16 as_float(F16 sum) { return sum; }
template <class T>
using Sums = decltype(start(Operand<T>{}));

template <int R, bool kTogether, class T>
inline void score_group(const Row<T>* rows, const T* lo, const T* hi, int64_t step, int64_t pairs,
                        typename Ahead<T>::Lines ahead, F16* scores) {
  Sums<T> even[R], odd[R];
  const Operand<T>* q[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    even[r] = odd[r] = start(Operand<T>{});
    q[r] = rows[r].q;
  }
#if defined(OCTAVO_ISA_avx2)
  // One chain after the other: both at once do not fit the registers.
  for (int64_t i = 0; i < pairs; i += 2) {
    const I16 k = kTogether ? load_words(lo + i * step) : load_words(lo + i * step, hi + i * step);
    if (sizeof(T) == 2 || i % 4 == 0) ahead.step();
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) even[r] = dot(even[r], k, splat_words(q[r] + 2 * i));
  }
  for (int64_t i = 1; i < pairs; i += 2) {
    const I16 k = kTogether ? load_words(lo + i * step) : load_words(lo + i * step, hi + i * step);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) odd[r] = dot(odd[r], k, splat_words(q[r] + 2 * i));
  }
#else
  for (int64_t i = 0; i < pairs; i += 2) {
    const I16 k = kTogether ? load_words(lo) : load_words(lo, hi);
    const I16 l = kTogether ? load_words(lo + step) : load_words(lo + step, hi + step);
    lo += 2 * step;
    hi += 2 * step;
    if (sizeof(T) == 2 || i % 4 == 0) ahead.step();
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      even[r] = dot(even[r], k, splat_words(q[r] + 2 * i));
      odd[r] = dot(odd[r], l, splat_words(q[r] + 2 * i + 2));
    }
  }
#endif
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) scores[r] = mul(as_float(add(even[r], odd[r])), splat(rows[r].factor));
}

// out = (old sums scaled by `keep`) + (sums of this split scaled by `take`); plainly the sums of this split for a row
// that starts here.
inline F16 merged(bool started, F16 old, float keep, F16 sums, float take) {
  return started ? fma(old, splat(keep), mul(sums, splat(take))) : sums;
}

// The weights of R rows, and what V is multiplied with: for words also their step.
template <class T, int R>
struct Weights {
  alignas(64) float of[R][kKvSplit];
  alignas(64) Operand<T> words[R][kKvSplit];
  float step[R];
};
template <int R>
struct Weights<float, R> {
  alignas(64) float of[R][kKvSplit];
};

// Calls add(position) for every kStep-th of the positions begin..end-1, while `ahead` fetches as much, evenly; or
// nothing where `quiet`. Inlined, as must be what it calls: otherwise sums leave the registers.
template <int kStep, class T, class Add>
inline __attribute__((always_inline)) void each_position(int64_t begin, int64_t end, Ahead<T>& ahead, bool quiet,
                                                         const Add& add) {
  const int64_t count = quiet ? 0 : (ahead.steps() + kLanes / kStep - 1) / (kLanes / kStep);
  if (count == 0) {
    for (int64_t j = begin; j < end; j += kStep) add(j);
    return;
  }
  for (int64_t j = begin; j < end;) {
    const int64_t stop = smaller(end, (j | (kLanes - 1)) + 1);
    typename Ahead<T>::Lines lines = ahead.next();
    for (; j < stop; j += kStep) {
      for (int64_t i = 0; i < count; ++i) lines.step();
      add(j);
    }
  }
}

// The sums over V of D vectors and R rows, for one split.
template <int R, int D>
inline void add_values(const Head<float>& head, Row<float>* rows, int64_t split, int64_t begin, int64_t end,
                       int64_t column, const Weights<float, R>& weights, const float* keep, const float* take,
                       Ahead<float>& ahead) {
  F16 sums[R][D];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) sums[r][d] = zero();
  // All rows see the middle; at the edges each sees a part. Rows are in ascending order of begin and end.
  int64_t middle_begin = larger(begin, rows[R - 1].begin);
  int64_t middle_end = smaller(end, rows[0].end);
  if (middle_begin >= middle_end) middle_begin = middle_end = end;
  const auto add_position = [&](int64_t j, bool at_edge) __attribute__((always_inline)) {
    const float* v = head.v(j) + column;
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      if (at_edge && (j < rows[r].begin || j >= rows[r].end)) continue;
      const F16 w = splat(weights.of[r][j - split]);
#pragma GCC unroll 4
      for (int d = 0; d < D; ++d) sums[r][d] = fma(w, load(v + d * kLanes), sums[r][d]);
    }
  };
  for (int64_t j = begin; j < middle_begin; ++j) add_position(j, true);
  each_position<1>(middle_begin, middle_end, ahead, column > 0,
                   [&](int64_t j) __attribute__((always_inline)) { add_position(j, false); });
  for (int64_t j = middle_end; j < end; ++j) add_position(j, true);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    float* out = rows[r].out + column;
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) {
      const F16 old = rows[r].started ? load(out + d * kLanes) : zero();
      store(out + d * kLanes, merged(rows[r].started, old, keep[r], sums[r][d], take[r]));
    }
  }
}

// The same over pairs of positions. What a row does not see of a pair counts as zero.
template <int R, int D, class T>
inline void add_values(const Head<T>& head, Row<T>* rows, int64_t split, int64_t begin, int64_t end, int64_t column,
                       const Weights<T, R>& weights, const float* keep, const float* take, Ahead<T>& ahead) {
  Sums<T> sums[R][D];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) sums[r][d] = start(Operand<T>{});
  // As above, in whole pairs.
  int64_t middle_begin = (larger(begin, rows[R - 1].begin) + 1) & ~int64_t{1};
  int64_t middle_end = smaller(end, rows[0].end) & ~int64_t{1};
  if (middle_begin >= middle_end) middle_begin = middle_end = end;
  const auto add_pair = [&](int64_t j, bool at_edge) __attribute__((always_inline)) {
    const T* p = head.v(j) + 2 * column;
    I16 v[D];
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) v[d] = load_words(p + 2 * d * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const I16 w = splat_words(weights.words[r] + (j - split));
      if (at_edge) {
        const uint32_t first = j >= rows[r].begin && j < rows[r].end ? 0xffffu : 0;
        const uint32_t second = j + 1 >= rows[r].begin && j + 1 < rows[r].end ? 0xffff0000u : 0;
        if (first + second == 0) continue;
        const I16 seen = splat_int(static_cast<int32_t>(first | second));
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d) sums[r][d] = dot(sums[r][d], and_bits(v[d], seen), w);
      } else {
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d) sums[r][d] = dot(sums[r][d], v[d], w);
      }
    }
  };
  for (int64_t j = begin & ~int64_t{1}; j < middle_begin && j < end; j += 2) add_pair(j, true);
  each_position<2>(middle_begin, middle_end, ahead, column > 0,
                   [&](int64_t j) __attribute__((always_inline)) { add_pair(j, false); });
  for (int64_t j = middle_end; j < end; j += 2) add_pair(j, true);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    float* out = rows[r].out + column;
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) {
      const F16 old = rows[r].started ? load(out + d * kLanes) : zero();
      F16 sum = as_float(sums[r][d]);
      if constexpr (sizeof(T) == 1) sum = mul(sum, splat(weights.step[r]));
      store(out + d * kLanes, merged(rows[r].started, old, keep[r], sum, take[r]));
    }
  }
}

template <int R, class T, int D = kTileVectors>
inline void add_columns(const Head<T>& head, Row<T>* rows, int64_t split, int64_t begin, int64_t end, int64_t column,
                        const Weights<T, R>& weights, const float* keep, const float* take, Ahead<T>& ahead) {
  for (; column + D * kLanes <= head.head_dim; column += D * kLanes)
    add_values<R, D>(head, rows, split, begin, end, column, weights, keep, take, ahead);
  if constexpr (D > 1) add_columns<R, T, D / 2>(head, rows, split, begin, end, column, weights, keep, take, ahead);
}

// The factors of sums so far and of a split's sums, for rows in lanes, and the merged maximum.
struct Factors {
  F16 keep, take, max;
};
inline Factors merge_factors(F16 old_max, F16 split_max) {
  const F16 most = max(old_max, split_max);
  return {exp_nonpositive(sub(old_max, most)), exp_nonpositive(sub(split_max, most)), most};
}

// The words of a row's weights times the scales of V.
template <int R>
inline void weigh_scales(const Head<int8_t>& head, Weights<int8_t, R>& weights, int r, int64_t split,
                         int64_t first_group, int64_t last_group, bool has_lo, bool has_hi) {
  F16 most_lanes = zero(), total_lanes = zero();
  for (int64_t group = first_group; group <= last_group; ++group) {
    const int64_t position = group * kLanes;
    float* w = weights.of[r] + (position - split);
    F16 scales;
    if (head.block_size() >= kLanes) {
      scales = load(head.scales(position, 1));
    } else {
      const bool lo = group > first_group || has_lo, hi = group < last_group || has_hi;
      scales = load_halves(head.scales(lo ? position : position + 8, 1), head.scales(hi ? position + 8 : position, 1));
    }
    // Where the weight is zero there may be no V and no scale.
    const F16 scaled = where_less(zero(), load(w), mul(load(w), scales), zero());
    store(w, scaled);
    most_lanes = max(most_lanes, scaled);
    total_lanes = add(total_lanes, scaled);
  }
  const float most = reduce_max(most_lanes), total = reduce_add(total_lanes);
  const bool usable = most >= kSmallest && total <= 0x1p120f;
  weights.step[r] = usable ? most / kMostWord : total * 0.0f;  // NaN where a scale is
  const F16 inverse = splat(usable ? kMostWord / most : 0.0f);
  for (int64_t group = first_group; group <= last_group; ++group) {
    const int64_t at = group * kLanes - split;
    store_words(weights.words[r] + at, usable ? round_int(mul(load(weights.of[r] + at), inverse)) : zero_int());
  }
}

// One split of R rows, each of which sees some of its positions.
template <int R, class T>
inline void attend_split(const Head<T>& head, Row<T>* rows, int64_t split, Ahead<T>& ahead) {
  const int64_t begin = larger(split, rows[0].begin);
  const int64_t end = smaller(split + kKvSplit, rows[R - 1].end);
  const int64_t first_group = begin / kLanes, last_group = (end - 1) / kLanes;
  const bool has_lo = begin % kLanes < 8, has_hi = (end - 1) % kLanes >= 8;  // of the first and of the last group
  const F16 hidden = splat(-HUGE_VALF);
  Weights<T, R> weights;

  F16 max_lanes[R];
  for (int r = 0; r < R; ++r) max_lanes[r] = hidden;
  for (int64_t group = first_group; group <= last_group; ++group) {
    const int64_t position = group * kLanes;
    F16 scores[R];
    [[maybe_unused]] F16 scales;
    if (head.block_size() >= kLanes) {
      const T* k = head.k(position);
      score_group<R, true>(rows, k, k + kLanes, 2 * head.block_size(), head.head_dim / 2, ahead.next(), scores);
      if constexpr (sizeof(T) == 1) scales = load(head.scales(position, 0));
    } else {
      // Two half groups in blocks of eight. A half that nobody sees may have no block: the other stands in, and is
      // masked.
      const int64_t lo = group > first_group || has_lo ? position : position + 8;
      const int64_t hi = group < last_group || has_hi ? position + 8 : position;
      score_group<R, false>(rows, head.k(lo), head.k(hi), 2 * head.block_size(), head.head_dim / 2, ahead.next(),
                            scores);
      if constexpr (sizeof(T) == 1) scales = load_halves(head.scales(lo, 0), head.scales(hi, 0));
    }
    for (int r = 0; r < R; ++r) {
      if constexpr (sizeof(T) == 1) scores[r] = mul(scores[r], scales);
      const int64_t visible_from = rows[r].begin - position, visible_to = rows[r].end - position;
      if (visible_to < kLanes) scores[r] = first_lanes(static_cast<int>(larger(visible_to, 0)), scores[r], hidden);
      if (visible_from > 0) scores[r] = first_lanes(static_cast<int>(smaller(visible_from, kLanes)), hidden, scores[r]);
      max_lanes[r] = max(max_lanes[r], scores[r]);
      store(weights.of[r] + (position - split), scores[r]);
    }
  }

  float old_max[kLanes] = {}, split_max[kLanes] = {}, split_sum[kLanes];
  for (int r = 0; r < R; ++r) {
    split_max[r] = reduce_max(max_lanes[r]);
    old_max[r] = rows[r].started ? rows[r].max : split_max[r];
    const F16 most = splat(split_max[r]);
    F16 sum_lanes = zero();
    for (int64_t group = first_group; group <= last_group; ++group) {
      float* w = weights.of[r] + (group * kLanes - split);
      const F16 e = exp_nonpositive(sub(load(w), most));
      sum_lanes = add(sum_lanes, e);
      store(w, e);
    }
    split_sum[r] = reduce_add(sum_lanes);
    if constexpr (sizeof(T) == 1) weigh_scales(head, weights, r, split, first_group, last_group, has_lo, has_hi);
    if constexpr (sizeof(T) == 2)
      for (int64_t at = first_group * kLanes - split; at <= last_group * kLanes - split; at += kLanes)
        store_bf16(weights.words[r] + at, load(weights.of[r] + at));
  }
  const Factors factors = merge_factors(load(old_max), load(split_max));
  float keep[kLanes], take[kLanes], merged_max[kLanes];
  store(keep, factors.keep);
  store(take, factors.take);
  store(merged_max, factors.max);
  add_columns<R>(head, rows, split, begin, end, 0, weights, keep, take, ahead);
  for (int r = 0; r < R; ++r) {
    rows[r].sum = rows[r].started ? fmaf(rows[r].sum, keep[r], split_sum[r] * take[r]) : split_sum[r];
    rows[r].max = rows[r].started ? merged_max[r] : split_max[r];
    rows[r].started = true;
  }
}

template <int R, class T>
inline void attend_up_to(int64_t count, const Head<T>& head, Row<T>* rows, int64_t split, Ahead<T>& ahead) {
  if constexpr (R > 1) {
    if (count < R) return attend_up_to<R - 1>(count, head, rows, split, ahead);
  }
  attend_split<R>(head, rows, split, ahead);
}

// The split of the rows that see some of it.
template <class T>
inline void attend_rows(const Head<T>& head, Row<T>* rows, int64_t count, int64_t split, Ahead<T>& ahead) {
  int64_t first = 0, last = count;
  while (first < last && rows[first].end <= split) ++first;
  while (first < last && rows[last - 1].begin >= split + kKvSplit) --last;
  Ahead<T> none(head);
  for (int64_t i = first; i < last; i += kTileRows)
    attend_up_to<kTileRows>(smaller(kTileRows, last - i), head, rows + i, split, i == first ? ahead : none);
}

// Rounds q to integers; returns their step. Not finite: NaN.
inline float to_words(const float* q, int64_t n, int16_t* words) {
  F16 most_lanes = zero(), total = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const F16 magnitude = abs(load(q + i));
    most_lanes = max(most_lanes, magnitude);
    total = add(total, magnitude);
  }
  const float most = reduce_max(most_lanes), sum = reduce_add(total);
  const bool usable = most >= kSmallest && sum <= 0x1p120f;
  const F16 inverse = splat(usable ? kMostWord / most : 0.0f);
  for (int64_t i = 0; i < n; i += kLanes)
    store_words(words + i, usable ? round_int(mul(load(q + i), inverse)) : zero_int());
  return usable ? most / kMostWord : sum * 0.0f;
}

template <class T>
inline void attend_head(const AttendArgs& a) {
  const Head<T> head(a);
  const int64_t heads_per_kv = a.num_heads / a.cache.num_kv_heads;
  const int64_t total = (a.token_end - a.token_begin) * heads_per_kv;
  for (int64_t first = 0; first < total; first += kMostRows) {
    Row<T> rows[kMostRows];
    alignas(64) Operand<T> words[sizeof(T) == 4 ? 1 : kMostRows * kMostHeadDim];
    const int64_t count = smaller(kMostRows, total - first);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = a.token_begin + (first + i) / heads_per_kv;
      const int64_t query_head = a.kv_head * heads_per_kv + (first + i) % heads_per_kv;
      const int64_t at = (token * a.num_heads + query_head) * head.head_dim;
      const int64_t position = a.positions[token];
      const int64_t begin = a.window > 0 ? larger(0, position - a.window + 1) : 0;
      float* out = a.partials == nullptr ? a.out + at : a.partials + (first + i) * attend_partial_size(head.head_dim);
      const Operand<T>* q;
      float factor = a.scale;
      if constexpr (sizeof(T) == 4) {
        q = a.q + at;
      } else {
        Operand<T>* to = words + i * head.head_dim;
        if constexpr (sizeof(T) == 1)
          factor *= to_words(a.q + at, head.head_dim, to);
        else
          for (int64_t d = 0; d < head.head_dim; ++d) to[d] = float_to_bf16(a.q[at + d]);
        q = to;
      }
      rows[i] = {q, factor, out, begin, position + 1, 0.0f, 0.0f, false};
    }
    if (a.partials != nullptr) {
      const int64_t begin = larger(a.split, rows[0].begin);
      const int64_t end = smaller(a.split + kKvSplit, rows[count - 1].end);
      Ahead<T> ahead(head, begin, larger(end, begin + 1));
      attend_rows(head, rows, count, a.split, ahead);
      for (int64_t i = 0; i < count; ++i) {
        float* state = rows[i].out + head.head_dim;
        state[0] = rows[i].max;
        state[1] = rows[i].sum;
        state[2] = rows[i].started ? 1.0f : 0.0f;
      }
      continue;
    }
    Ahead<T> ahead(head, rows[0].begin, rows[count - 1].end);
    for (int64_t split = rows[0].begin / kKvSplit * kKvSplit; split < rows[count - 1].end; split += kKvSplit)
      attend_rows(head, rows, count, split, ahead);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; d < head.head_dim; d += kLanes)
        store(rows[i].out + d, div(load(rows[i].out + d), splat(rows[i].sum)));
  }
}

inline void set_element(float* p, float x) { *p = x; }
inline void set_element(uint16_t* p, float x) { *p = float_to_bf16(x); }

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
    constexpr int32_t kTogether = sizeof(T) == 2 ? 2 : 1;  // positions of V that lie in pairs
    T* row = out + half + static_cast<int64_t>(offset / kTogether) * kTogether * cache.head_dim + offset % kTogether;
    for (int32_t d = 0; d < cache.head_dim; ++d) set_element(row + kTogether * d, v[d]);
    k += cache.head_dim;
    v += cache.head_dim;
    out += 2 * half;
  }
}

// Rounds a vector to levels in -127..127, `kMostByte / absmax` times its elements, ties to even; returns the scale,
// absmax / kMostByte. All zero when absmax is tiny, with a scale of NaN when an element is not finite.
inline float to_bytes(const float* x, int64_t n, int32_t* levels) {
  F16 most_lanes = zero(), total = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const F16 magnitude = abs(load(x + i));
    most_lanes = max(most_lanes, magnitude);
    total = add(total, magnitude);
  }
  const float most = reduce_max(most_lanes), sum = reduce_add(total);
  const bool usable = most >= kSmallest && sum <= 0x1p120f;
  const F16 inverse = splat(usable ? kMostByte / most : 0.0f);
  for (int64_t i = 0; i < n; i += kLanes)
    store_int(levels + i, usable ? round_int(mul(load(x + i), inverse)) : zero_int());
  return usable ? most / kMostByte : sum * 0.0f;
}

template <>
inline void write_token<int8_t>(const KvCache& cache, const float* k, const float* v, int32_t block, int32_t offset) {
  const int64_t half = static_cast<int64_t>(cache.block_size) * cache.head_dim;
  const int64_t head_bytes = kv_head_bytes(KvFormat::kI8, cache.block_size, cache.head_dim);
  int8_t* out = static_cast<int8_t*>(cache.data) + block * cache.num_kv_heads * head_bytes;
  int32_t levels[kMostHeadDim];
  for (int32_t h = 0; h < cache.num_kv_heads; ++h) {
    float* scales = reinterpret_cast<float*>(out + 2 * half);
    scales[offset] = to_bytes(k, cache.head_dim, levels);
    int8_t* pair = out + 2 * offset;
    for (int32_t d = 0; d < cache.head_dim; d += 2, pair += 2 * cache.block_size) {
      pair[0] = static_cast<int8_t>(levels[d]);
      pair[1] = static_cast<int8_t>(levels[d + 1]);
    }
    scales[cache.block_size + offset] = to_bytes(v, cache.head_dim, levels);
    int8_t* row = out + half + static_cast<int64_t>(offset & ~1) * cache.head_dim + (offset & 1);
    for (int32_t d = 0; d < cache.head_dim; ++d) row[2 * d] = static_cast<int8_t>(levels[d]);
    k += cache.head_dim;
    v += cache.head_dim;
    out += head_bytes;
  }
}

}  // namespace

void kv_write(const KvCache& cache, const float* k, const float* v, int32_t block, int32_t offset) {
  switch (cache.format) {
    case KvFormat::kF32:
      return write_token<float>(cache, k, v, block, offset);
    case KvFormat::kBF16:
      return write_token<uint16_t>(cache, k, v, block, offset);
    case KvFormat::kI8:
      return write_token<int8_t>(cache, k, v, block, offset);
  }
}

void attend(const AttendArgs& args) {
  switch (args.cache.format) {
    case KvFormat::kF32:
      return attend_head<float>(args);
    case KvFormat::kBF16:
      return attend_head<uint16_t>(args);
    case KvFormat::kI8:
      return attend_head<int8_t>(args);
  }
}

void merge_splits(const float* partials, int64_t splits, int64_t stride, int64_t head_dim, float* out) {
  bool started = false;
  float most = 0.0f, sum = 0.0f;
  for (const float* partial = partials; splits > 0; --splits, partial += stride) {
    const float* state = partial + head_dim;
    if (state[2] == 0.0f) continue;
    const Factors factors = merge_factors(splat(started ? most : state[0]), splat(state[0]));
    float keep[kLanes], take[kLanes], merged_max[kLanes];
    store(keep, factors.keep);
    store(take, factors.take);
    store(merged_max, factors.max);
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store(out + d, merged(started, started ? load(out + d) : zero(), keep[0], load(partial + d), take[0]));
    sum = started ? fmaf(sum, keep[0], state[1] * take[0]) : state[1];
    most = started ? merged_max[0] : state[0];
    started = true;
  }
  for (int64_t d = 0; d < head_dim; d += kLanes) store(out + d, div(load(out + d), splat(sum)));
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
