// Matrix products with packed weights: out[row, column] = sum over k of x[row, k] * w[column, k], plus bias.
//
// Arithmetic, version 1, the same bits on every instruction set and for every number of rows, panels and threads. Every
// fma is rounded to float32 once; every chain runs in ascending k and starts from zero; the bias is added last.
//   kU8 and symmetric kU4, per block of 32, with zero = 128 or 8:
//     acc = fma(weight.scale * input.scale, float(sum(level * q) - zero * sum(q)), acc)
//   kU4 with mins, per block of 32:
//     acc = fma(weight.scale * input.scale, float(sum(level * q)), acc)
//     acc = fma(weight.min, input.sum, acc)
//   kBF16, per pair of k:
//     acc = fma(w[k + 1], x[k + 1], acc)
//     acc = fma(w[k], x[k], acc)
//   kF32: acc = fma(w[k], x[k], acc)
// The sums of integers are exact and below 2^24, so is their conversion. The order within a pair of bf16 is that of
// vdpbf16ps (measured on Zen 4), which flushes denormals, as the threads that run kernels do. Changing any of it
// changes the arithmetic version that names caches and results.
//
// A tile is R rows times P panels whose accumulators stay in registers; R and P are speed only. Sixteen columns lie in
// lanes, so neither rows nor columns are ever summed across lanes.
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/ops.h"
#include "kernels/panels.h"
#include "kernels/simd.h"

#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// What a tile fetches for the tiles of the next panels: `lines` cache lines at each of its steps through K.
struct Prefetch {
  uintptr_t at;  // a number: it may run past the weights
  int64_t lines;

  OCTAVO_INLINE void step() {
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(reinterpret_cast<const void*>(at + 64 * i), 0, 2);
    at += 64 * lines;
  }
};

// Writes a row's 16 columns, or those that exist.
OCTAVO_INLINE void store_columns(const LinearArgs& args, int64_t row, int64_t panel, F16 value) {
  const int64_t column = panel * kPanel;
  float* out = args.out + row * args.out_stride + column;
  if (args.weight.n - column >= kPanel) {
    store(out, args.bias ? add(value, load(args.bias + column)) : value);
    return;
  }
  const int64_t count = args.weight.n - column;
  float values[kPanel];
  store(values, value);
  for (int64_t i = 0; i < count; ++i) out[i] = args.bias ? values[i] + args.bias[column + i] : values[i];
}

// ---- Integer dot products of one block: 16 columns, R rows that lie `stride` blocks apart.

#if defined(OCTAVO_ISA_avx512)

OCTAVO_INLINE __m512i broadcast4(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}

template <int R>
OCTAVO_INLINE void dot_u4(const uint8_t* levels, bool symmetric, const QuantBlock* input, int64_t stride,
                          I16 (&dots)[R]) {
  for (int r = 0; r < R; ++r)
    dots[r].v = symmetric ? _mm512_srai_epi32(_mm512_set1_epi32(input[r * stride].offset), 4) : _mm512_setzero_si512();
  const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i pair = _mm512_load_si512(levels + 64 * j);
    const __m512i low = _mm512_and_si512(pair, nibble);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(pair, 4), nibble);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      dots[r].v = _mm512_dpbusd_epi32(dots[r].v, low, broadcast4(input[r * stride].values + 4 * j));
      dots[r].v = _mm512_dpbusd_epi32(dots[r].v, high, broadcast4(input[r * stride].values + 4 * j + 16));
    }
  }
}

template <int R>
OCTAVO_INLINE void dot_u8(const uint8_t* levels, const QuantBlock* input, int64_t stride, I16 (&dots)[R]) {
  for (int r = 0; r < R; ++r) dots[r].v = _mm512_set1_epi32(input[r * stride].offset);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const __m512i level = _mm512_load_si512(levels + 64 * j);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      dots[r].v = _mm512_dpbusd_epi32(dots[r].v, level, broadcast4(input[r * stride].values + 4 * j));
  }
}

#elif defined(OCTAVO_ISA_avx2)

// vpmaddubsw saturates to 16 bits, so it gets nibbles only: eight sums of two products are at most 8 * 2 * 15 * 127 =
// 30480. Levels of 8 bits are two nibbles.

OCTAVO_INLINE __m256i broadcast4(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}
OCTAVO_INLINE __m256i low_nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
OCTAVO_INLINE __m256i high_nibbles(__m256i x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }

// Both halves of the columns at once, so that an activation is broadcast once for them: 4 registers hold weights, 2 R
// hold sums. Unrolled, more than one row would spill them.
template <int R>
OCTAVO_INLINE void step_u4(const uint8_t* levels, const int8_t* values, int64_t stride, __m256i (&lo)[R],
                           __m256i (&hi)[R]) {
  const __m256i* pairs = reinterpret_cast<const __m256i*>(levels);
  const __m256i first = _mm256_load_si256(pairs), second = _mm256_load_si256(pairs + 1);
  const __m256i first_low = low_nibbles(first), first_high = high_nibbles(first);
  const __m256i second_low = low_nibbles(second), second_high = high_nibbles(second);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m256i x = broadcast4(values + r * stride);
    lo[r] = _mm256_add_epi16(lo[r], _mm256_maddubs_epi16(first_low, x));
    hi[r] = _mm256_add_epi16(hi[r], _mm256_maddubs_epi16(second_low, x));
    const __m256i y = broadcast4(values + r * stride + 16);
    lo[r] = _mm256_add_epi16(lo[r], _mm256_maddubs_epi16(first_high, y));
    hi[r] = _mm256_add_epi16(hi[r], _mm256_maddubs_epi16(second_high, y));
  }
}

template <int R>
OCTAVO_INLINE void dot_u4(const uint8_t* levels, bool symmetric, const QuantBlock* input, int64_t stride,
                          I16 (&dots)[R]) {
  __m256i lo[R], hi[R];
  for (int r = 0; r < R; ++r) lo[r] = hi[r] = _mm256_setzero_si256();
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(QuantBlock));
  if constexpr (R == 1) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) step_u4<R>(levels + 64 * j, input->values + 4 * j, bytes, lo, hi);
  } else {
#pragma GCC unroll 1
    for (int j = 0; j < 4; ++j) step_u4<R>(levels + 64 * j, input->values + 4 * j, bytes, lo, hi);
  }
  const __m256i one = _mm256_set1_epi16(1);
  for (int r = 0; r < R; ++r) {
    dots[r] = {_mm256_madd_epi16(lo[r], one), _mm256_madd_epi16(hi[r], one)};
    if (symmetric) {
      const __m256i offset = _mm256_srai_epi32(_mm256_set1_epi32(input[r * stride].offset), 4);
      dots[r] = {_mm256_add_epi32(dots[r].lo, offset), _mm256_add_epi32(dots[r].hi, offset)};
    }
  }
}

template <int R>
OCTAVO_INLINE void dot_u8_half(const uint8_t* levels, const QuantBlock* input, int64_t stride, __m256i (&dots)[R]) {
  __m256i low_sums[R], high_sums[R];
  for (int r = 0; r < R; ++r) low_sums[r] = high_sums[r] = _mm256_setzero_si256();
#pragma GCC unroll 1
  for (int j = 0; j < 8; ++j) {
    const __m256i level = _mm256_load_si256(reinterpret_cast<const __m256i*>(levels + 64 * j));
    const __m256i low = low_nibbles(level);
    const __m256i high = high_nibbles(level);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256i x = broadcast4(input[r * stride].values + 4 * j);
      low_sums[r] = _mm256_add_epi16(low_sums[r], _mm256_maddubs_epi16(low, x));
      high_sums[r] = _mm256_add_epi16(high_sums[r], _mm256_maddubs_epi16(high, x));
    }
  }
  for (int r = 0; r < R; ++r) {
    dots[r] = _mm256_add_epi32(_mm256_madd_epi16(low_sums[r], _mm256_set1_epi16(1)),
                               _mm256_madd_epi16(high_sums[r], _mm256_set1_epi16(16)));
    dots[r] = _mm256_add_epi32(dots[r], _mm256_set1_epi32(input[r * stride].offset));
  }
}

template <int R>
OCTAVO_INLINE void dot_u8(const uint8_t* levels, const QuantBlock* input, int64_t stride, I16 (&dots)[R]) {
  __m256i lo[R], hi[R];
  dot_u8_half<R>(levels, input, stride, lo);
  dot_u8_half<R>(levels + 32, input, stride, hi);
  for (int r = 0; r < R; ++r) dots[r] = {lo[r], hi[r]};
}

#else  // portable

// Vectors of 16-bit lanes, which GCC and clang compile to any target's. A lane holds two levels of a column (as bytes,
// k even or odd) and sums at most 16 products of a nibble and an activation: 16 * 15 * 127 = 30480. Levels of 8 bits
// are two nibbles. Little-endian, as GGUF.
typedef int16_t Short8 __attribute__((vector_size(16)));
typedef uint16_t UShort8 __attribute__((vector_size(16)));

inline constexpr int kQuarters = 4;  // of the 64 bytes that hold 4 k of 16 columns: 4 columns each

// The levels of k, k + 2 in turn, times theirs, plus the levels of k + 1, k + 3 times theirs.
OCTAVO_INLINE Short8 multiply4(UShort8 levels, const int8_t* x) {
  const Short8 even = {x[0], x[2], x[0], x[2], x[0], x[2], x[0], x[2]};
  const Short8 odd = {x[1], x[3], x[1], x[3], x[1], x[3], x[1], x[3]};
  return reinterpret_cast<Short8>(levels & 15) * even + reinterpret_cast<Short8>(levels >> 8 & 15) * odd;
}

OCTAVO_INLINE UShort8 load_quarter(const uint8_t* levels, int quarter) {
  UShort8 result;
  memcpy(&result, levels + 16 * quarter, sizeof result);
  return result;
}

OCTAVO_INLINE void add_columns(const Short8 (&sums)[kQuarters], int32_t factor, int32_t (&dots)[kPanel]) {
  for (int c = 0; c < kPanel; ++c) dots[c] += factor * (sums[c / 4][c % 4 * 2] + sums[c / 4][c % 4 * 2 + 1]);
}

template <int R>
inline void dot_u4(const uint8_t* levels, bool symmetric, const QuantBlock* input, int64_t stride, I16 (&dots)[R]) {
  for (int r = 0; r < R; ++r) {
    const QuantBlock& x = input[r * stride];
    Short8 sums[kQuarters] = {};
    for (int j = 0; j < 4; ++j) {
      for (int i = 0; i < kQuarters; ++i) {
        const UShort8 pairs = load_quarter(levels + 64 * j, i);
        sums[i] += multiply4(pairs, x.values + 4 * j) + multiply4(pairs >> 4, x.values + 4 * j + 16);
      }
    }
    for (int32_t& dot : dots[r].v) dot = symmetric ? x.offset / 16 : 0;
    add_columns(sums, 1, dots[r].v);
  }
}

template <int R>
inline void dot_u8(const uint8_t* levels, const QuantBlock* input, int64_t stride, I16 (&dots)[R]) {
  for (int r = 0; r < R; ++r) {
    const QuantBlock& x = input[r * stride];
    Short8 low[kQuarters] = {}, high[kQuarters] = {};
    for (int j = 0; j < 8; ++j) {
      for (int i = 0; i < kQuarters; ++i) {
        const UShort8 level = load_quarter(levels + 64 * j, i);
        low[i] += multiply4(level, x.values + 4 * j);
        high[i] += multiply4(level >> 4, x.values + 4 * j);
      }
    }
    for (int32_t& dot : dots[r].v) dot = x.offset;
    add_columns(low, 1, dots[r].v);
    add_columns(high, 16, dots[r].v);
  }
}

#endif

// ---- Tiles. Each packing names its steps through K, their cache lines per panel, and the most rows and panels of a
// tile. Dependent chains must be enough to hide their latency, accumulators and weights few enough for the registers.

#if defined(OCTAVO_ISA_avx512)
inline constexpr int kIntegerRows = 5;
inline constexpr int kFloatRows = 4;
inline constexpr int kFloatPanels = 4;
#elif defined(OCTAVO_ISA_avx2)
inline constexpr int kIntegerRows = 4;
inline constexpr int kFloatRows = 4;
inline constexpr int kFloatPanels = 1;
#else
inline constexpr int kIntegerRows = 2;
inline constexpr int kFloatRows = 2;
inline constexpr int kFloatPanels = 1;
#endif

// Tiles that follow each other on the same panels from which on they fetch the next ones. A single one is faster
// without where whole vectors follow the stream by themselves (kU8: 35 against 22 GB/s on a Zen 4 core), and faster
// with it in half vectors (12.5 against 15.2 GB/s on two Zen 3 cores).
#if defined(OCTAVO_ISA_avx512)
inline constexpr int64_t kFewestFetchingTiles = 2;
#else
inline constexpr int64_t kFewestFetchingTiles = 1;
#endif

struct U4Min {
  static constexpr int64_t kStepLines = kU4MinBlockBytes / 64;
  static constexpr int kRows = kIntegerRows;
  static int64_t steps(int64_t k) { return k / kQuantBlock; }
  static constexpr int kPanels = 1;

  template <int R, int P>
  static void tile(const LinearArgs& args, int64_t panel, int64_t row, Prefetch prefetch) {
    static_assert(P == 1);
    const int64_t blocks = args.weight.k / kQuantBlock;
    const uint8_t* weights = args.weight.data + panel * args.weight.panel_bytes;
    const QuantBlock* input = static_cast<const QuantBlock*>(args.input.values) + row * blocks;
    F16 acc[R];
    for (F16& a : acc) a = zero();
    for (int64_t b = 0; b < blocks; ++b, weights += kU4MinBlockBytes, ++input) {
      prefetch.step();
      I16 dots[R];
      dot_u4<R>(weights + 2 * kHalvesBytes, false, input, blocks, dots);
      const F16 scale = load_f16(reinterpret_cast<const uint16_t*>(weights));
      const F16 min = load_f16(reinterpret_cast<const uint16_t*>(weights + kHalvesBytes));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const QuantBlock& x = input[r * blocks];
        acc[r] = fma(mul(scale, splat(x.scale)), to_float(dots[r]), acc[r]);
        acc[r] = fma(min, splat(x.sum), acc[r]);
      }
    }
    for (int r = 0; r < R; ++r) store_columns(args, row + r, panel, acc[r]);
  }
};

template <int64_t kLevelBytes>
struct Paired {
  static constexpr int64_t kStepLines = (2 * kHalvesBytes + 2 * kLevelBytes) / 64 / 2 + 1;
  static constexpr int kRows = kIntegerRows;
  static int64_t steps(int64_t k) { return k / kQuantBlock; }
  static constexpr int kPanels = 1;

  template <int R, int P>
  static void tile(const LinearArgs& args, int64_t panel, int64_t row, Prefetch prefetch) {
    static_assert(P == 1);
    const int64_t blocks = args.weight.k / kQuantBlock;
    const uint8_t* weights = args.weight.data + panel * args.weight.panel_bytes;
    const QuantBlock* input = static_cast<const QuantBlock*>(args.input.values) + row * blocks;
    F16 acc[R];
    for (F16& a : acc) a = zero();
    for (int64_t b = 0; b < blocks; ++b, ++input) {
      prefetch.step();
      const uint8_t* levels = weights + pair_levels_offset(b, kLevelBytes);
      I16 dots[R];
      if constexpr (kLevelBytes == kU4LevelBytes) {
        dot_u4<R>(levels, true, input, blocks, dots);
      } else {
        dot_u8<R>(levels, input, blocks, dots);
      }
      const F16 scale = load_f16(reinterpret_cast<const uint16_t*>(weights + pair_scales_offset(b, kLevelBytes)));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r] = fma(mul(scale, splat(input[r * blocks].scale)), to_float(dots[r]), acc[r]);
    }
    for (int r = 0; r < R; ++r) store_columns(args, row + r, panel, acc[r]);
  }
};

// Two weights of each of 16 columns, times two activations `x` (the even one in the low half), odd product first.
#if defined(OCTAVO_ISA_avx512)
struct Pairs {
  __m512i v;
};
OCTAVO_INLINE Pairs load_pairs(const uint8_t* p) { return {_mm512_load_si512(p)}; }
OCTAVO_INLINE F16 multiply_pairs(Pairs w, uint32_t x, F16 acc) {
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(w.v),
                           reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int32_t>(x))))};
}
#else
struct Pairs {
  F16 even, odd;
};
#if defined(OCTAVO_ISA_avx2)
OCTAVO_INLINE Pairs load_pairs(const uint8_t* p) {
  const __m256i lo = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i hi = _mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32));
  const __m256i upper = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(lo, upper)), _mm256_castsi256_ps(_mm256_and_si256(hi, upper))}};
}
#else
inline Pairs load_pairs(const uint8_t* p) {
  Pairs pairs;
  for (int c = 0; c < kPanel; ++c) {
    uint16_t two[2];
    memcpy(two, p + 4 * c, sizeof two);
    pairs.even.v[c] = bf16_to_float(two[0]);
    pairs.odd.v[c] = bf16_to_float(two[1]);
  }
  return pairs;
}
#endif
OCTAVO_INLINE F16 multiply_pairs(const Pairs& w, uint32_t x, F16 acc) {
  acc = fma(w.odd, splat(bf16_to_float(static_cast<uint16_t>(x >> 16))), acc);
  return fma(w.even, splat(bf16_to_float(static_cast<uint16_t>(x))), acc);
}
#endif

struct BF16 {
  static constexpr int64_t kStepLines = 1;
  static constexpr int kRows = kFloatRows;
  static int64_t steps(int64_t k) { return (k + 1) / 2; }
  static constexpr int kPanels = kFloatPanels;

  template <int R, int P>
  static OCTAVO_INLINE void step(const uint8_t* weights, int64_t panel_bytes, const uint32_t (&x)[R],
                                 F16 (&acc)[R][P]) {
    Pairs w[P];
    for (int p = 0; p < P; ++p) w[p] = load_pairs(weights + p * panel_bytes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[r][p] = multiply_pairs(w[p], x[r], acc[r][p]);
  }

  template <int R, int P>
  static void tile(const LinearArgs& args, int64_t panel, int64_t row, Prefetch prefetch) {
    const int64_t k = args.weight.k;
    const int64_t panel_bytes = args.weight.panel_bytes;
    const uint8_t* weights = args.weight.data + panel * panel_bytes;
    const uint16_t* input = static_cast<const uint16_t*>(args.input.values) + row * k;
    F16 acc[R][P];
    for (auto& a : acc)
      for (F16& value : a) value = zero();
    uint32_t x[R];
    for (int64_t i = 0; i + 1 < k; i += 2, weights += 64) {
      prefetch.step();
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) memcpy(&x[r], input + r * k + i, sizeof x[r]);
      step<R, P>(weights, panel_bytes, x, acc);
    }
    if (k % 2 == 1) {  // the pair's odd weight is zero, its activation does not exist
      for (int r = 0; r < R; ++r) x[r] = input[r * k + k - 1];
      step<R, P>(weights, panel_bytes, x, acc);
    }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) store_columns(args, row + r, panel + p, acc[r][p]);
  }
};

struct F32 {
  static constexpr int64_t kStepLines = 1;
  static constexpr int kRows = kFloatRows;
  static int64_t steps(int64_t k) { return k; }
  static constexpr int kPanels = kFloatPanels;

  template <int R, int P>
  static void tile(const LinearArgs& args, int64_t panel, int64_t row, Prefetch prefetch) {
    const int64_t k = args.weight.k;
    const int64_t stride = args.weight.panel_bytes / static_cast<int64_t>(sizeof(float));
    const float* weights = reinterpret_cast<const float*>(args.weight.data) + panel * stride;
    const float* input = static_cast<const float*>(args.input.values) + row * k;
    F16 acc[R][P];
    for (auto& a : acc)
      for (F16& value : a) value = zero();
    for (int64_t i = 0; i < k; ++i) {
      prefetch.step();
      F16 w[P];
      for (int p = 0; p < P; ++p) w[p] = load(weights + p * stride + i * kPanel);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) acc[r][p] = fma(w[p], splat(input[r * k + i]), acc[r][p]);
    }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) store_columns(args, row + r, panel + p, acc[r][p]);
  }
};

// ---- All rows of a range of panels.

// std::make_integer_sequence, without the standard library.
template <int... kIndex>
struct Sequence {};
template <int N, int... kIndex>
struct Count : Count<N - 1, N - 1, kIndex...> {};
template <int... kIndex>
struct Count<0, kIndex...> {
  using Type = Sequence<kIndex...>;  // 0 .. N - 1
};

using Tile = void (*)(const LinearArgs& args, int64_t panel, int64_t row, Prefetch prefetch);

// By rows - 1.
template <class Weights>
struct Tiles {
  Tile wide[Weights::kRows];    // Weights::kPanels panels
  Tile narrow[Weights::kRows];  // one panel
};

template <class Weights, int... kRow>
constexpr Tiles<Weights> make_tiles(Sequence<kRow...>) {
  return {{&Weights::template tile<kRow + 1, Weights::kPanels>...}, {&Weights::template tile<kRow + 1, 1>...}};
}

template <class Weights>
void multiply_panels(const LinearArgs& args, int64_t panel_begin, int64_t panel_end) {
  static constexpr Tiles<Weights> kTiles = make_tiles<Weights>(typename Count<Weights::kRows>::Type{});
  const int64_t rows = args.input.rows;
  if (rows == 0) return;
  const int64_t tiles = (rows + Weights::kRows - 1) / Weights::kRows;  // balanced: they differ by one row at most
  const int64_t steps = Weights::steps(args.weight.k);
  for (int64_t panel = panel_begin; panel < panel_end;) {
    const int64_t width = panel_end - panel >= Weights::kPanels ? Weights::kPanels : 1;
    const Tile* tile_of = width == 1 ? kTiles.narrow : kTiles.wide;
    // Several tiles read the same panels, which stops the stream of weights that the hardware would follow; so each
    // fetches `share` lines per step, and together they fetch the next panels.
    const bool ahead = tiles >= kFewestFetchingTiles && panel + width < panel_end;
    const int64_t step_lines = Weights::kStepLines * width;
    const int64_t share = (step_lines + tiles - 1) / tiles;
    const uintptr_t next = reinterpret_cast<uintptr_t>(args.weight.data + (panel + width) * args.weight.panel_bytes);
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t end = rows * (t + 1) / tiles;
      const int64_t lines = ahead && t * share < step_lines ? share : 0;
      tile_of[end - row - 1](args, panel, row, Prefetch{next + t * steps * share * 64, lines});
      row = end;
    }
    panel += width;
  }
}

}  // namespace

// Vectorised by the compiler: elementwise operations, and integer reductions, which have no order.
void quantize_row(const float* x, int64_t k, QuantBlock* out) {
  constexpr float kSmallest = 0x1p-100f;  // below it scale and its inverse would leave the normal range
  constexpr float kRound = 0x1.8p23f;     // x + kRound has the nearest integer of x in its lowest bits, ties to even
  constexpr int32_t kRoundBits = 0x4b400000;  // of kRound
  constexpr int32_t kInfinityBits = 0x7f800000;
  for (int64_t b = 0; b < k / kQuantBlock; ++b, x += kQuantBlock, ++out) {
    int32_t most = 0;  // magnitudes order like their bits
    for (int i = 0; i < kQuantBlock; ++i) {
      int32_t magnitude;
      memcpy(&magnitude, x + i, sizeof magnitude);
      magnitude &= INT32_MAX;
      most = magnitude > most ? magnitude : most;
    }
    float absmax;
    memcpy(&absmax, &most, sizeof absmax);
    if (most >= kInfinityBits || absmax < kSmallest) {
      memset(out, 0, sizeof *out);
      if (most >= kInfinityBits) out->scale = out->sum = __builtin_nanf("");
      continue;
    }
    out->scale = absmax / 127.0f;
    const float inverse = 127.0f / absmax;
    int32_t values[kQuantBlock];
    for (int i = 0; i < kQuantBlock; ++i) {
      const float shifted = x[i] * inverse + kRound;
      memcpy(&values[i], &shifted, sizeof shifted);
      values[i] -= kRoundBits;
    }
    int32_t total = 0;
    for (int i = 0; i < kQuantBlock; ++i) total += values[i];
    for (int i = 0; i < kQuantBlock; ++i) out->values[i] = static_cast<int8_t>(values[i]);
    out->sum = out->scale * static_cast<float>(total);
    out->offset = -128 * total;
  }
}

void to_bf16_row(const float* x, int64_t k, uint16_t* out) {
  for (int64_t i = 0; i < k; ++i) out[i] = float_to_bf16(x[i]);
}

void linear(const LinearArgs& args, int64_t panel_begin, int64_t panel_end) {
  switch (args.weight.packing) {
    case Packing::kU4:
      if (args.weight.symmetric) return multiply_panels<Paired<kU4LevelBytes>>(args, panel_begin, panel_end);
      return multiply_panels<U4Min>(args, panel_begin, panel_end);
    case Packing::kU8:
      return multiply_panels<Paired<kU8LevelBytes>>(args, panel_begin, panel_end);
    case Packing::kBF16:
      return multiply_panels<BF16>(args, panel_begin, panel_end);
    case Packing::kF32:
      return multiply_panels<F32>(args, panel_begin, panel_end);
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
