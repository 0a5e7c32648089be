// Loads and stores of interleaved pairs (x0 y0 x1 y1 ...) as two vectors: rotary pairs, and two head dimensions of the
// K cache. And pairs of 16-bit words, two in each lane, for dot products with a cache of 8-bit integers or bf16.
#pragma once

#include "kernels/simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct Pairs {
  F16 first, second;
};

// 16 pairs: 8 at `lo`, 8 at `hi`; hi is lo + 16 where they lie together.
#if defined(OCTAVO_ISA_avx512)

inline Pairs load_pairs(const float* lo, const float* hi) {
  const __m512 a = _mm512_loadu_ps(lo), b = _mm512_loadu_ps(hi);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return {{_mm512_permutex2var_ps(a, even, b)}, {_mm512_permutex2var_ps(a, odd, b)}};
}
inline void store_pairs(float* p, Pairs a) {
  const __m512i lo = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i hi = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  _mm512_storeu_ps(p, _mm512_permutex2var_ps(a.first.v, lo, a.second.v));
  _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(a.first.v, hi, a.second.v));
}

#elif defined(OCTAVO_ISA_avx2)

struct HalfPairs {
  __m256 first, second;
};
inline HalfPairs load_half_pairs(const float* p) {
  const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8);
  constexpr int kInterleaveHalves = 0xd8;
  const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88));
  const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xdd));
  return {_mm256_castpd_ps(_mm256_permute4x64_pd(even, kInterleaveHalves)),
          _mm256_castpd_ps(_mm256_permute4x64_pd(odd, kInterleaveHalves))};
}
inline Pairs load_pairs(const float* lo, const float* hi) {
  const HalfPairs a = load_half_pairs(lo), b = load_half_pairs(hi);
  return {{a.first, b.first}, {a.second, b.second}};
}
inline void store_half_pairs(float* p, __m256 first, __m256 second) {
  const __m256 lo = _mm256_unpacklo_ps(first, second), hi = _mm256_unpackhi_ps(first, second);
  _mm256_storeu_ps(p, _mm256_permute2f128_ps(lo, hi, 0x20));
  _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(lo, hi, 0x31));
}
inline void store_pairs(float* p, Pairs a) {
  store_half_pairs(p, a.first.lo, a.second.lo);
  store_half_pairs(p + 16, a.first.hi, a.second.hi);
}

#else  // portable: the definition

inline Pairs load_pairs(const float* lo, const float* hi) {
  Pairs r;
  for (int i = 0; i < kLanes; ++i) {
    const float* pair = i < 8 ? lo + 2 * i : hi + 2 * (i - 8);
    r.first.v[i] = pair[0];
    r.second.v[i] = pair[1];
  }
  return r;
}
inline void store_pairs(float* p, Pairs a) {
  for (int i = 0; i < kLanes; ++i) {
    p[2 * i] = a.first.v[i];
    p[2 * i + 1] = a.second.v[i];
  }
}

#endif

inline Pairs load_pairs(const float* p) { return load_pairs(p, p + 16); }

// Sixteen lanes of two 16-bit words. Loaded from bytes or words: pair i is p[2i], p[2i + 1]; 8 pairs at lo, 8 at hi.
#if defined(OCTAVO_ISA_avx512)

inline I16 zero_int() { return {_mm512_setzero_si512()}; }
inline I16 add(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I16 load_words(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline I16 load_words(const int8_t* lo, const int8_t* hi) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(lo));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(hi));
  return {_mm512_cvtepi8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1))};
}
inline I16 load_words(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
inline I16 load_words(const uint16_t* lo, const uint16_t* hi) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lo));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(hi));
  return {_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1)};
}
inline I16 splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I16 and_bits(I16 a, I16 b) { return {_mm512_and_si512(a.v, b.v)}; }
// sum + a.first * b.first + a.second * b.second
inline I16 dot_words(I16 sum, I16 a, I16 b) {
  // GCC 12 copies every sum before and after its intrinsic in loops.
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
  return sum;
}
// sum + a.second * b.second, rounded, + a.first * b.first, rounded; words are bf16.
inline F16 dot_bf16(F16 sum, I16 a, I16 b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
  return sum;
}
// The lanes as 16-bit integers; they must fit.
inline void store_words(int16_t* p, I16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
// The lanes rounded to bf16. No denormals, which this flushes.
inline void store_bf16(uint16_t* p, F16 a) {
  const __m256bh words = _mm512_cvtneps_pbh(a.v);
  memcpy(p, &words, sizeof words);
}

#elif defined(OCTAVO_ISA_avx2)

inline I16 zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I16 add(I16 a, I16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline I16 load_words(const int8_t* lo, const int8_t* hi) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lo))),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(hi)))};
}
inline I16 load_words(const int8_t* p) { return load_words(p, p + 16); }
inline I16 load_words(const uint16_t* lo, const uint16_t* hi) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lo)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(hi))};
}
inline I16 load_words(const uint16_t* p) { return load_words(p, p + 16); }
inline I16 splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I16 and_bits(I16 a, I16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline I16 dot_words(I16 sum, I16 a, I16 b) {
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi))};
}
inline void store_words(int16_t* p, I16 a) {
  constexpr int kInterleaveHalves = 0xd8;
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), kInterleaveHalves);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}

#else  // portable: the definition

inline I16 zero_int() { return {}; }
inline I16 add(I16 a, I16 b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] += b.v[i];
  return a;
}
inline int32_t pack_words(int16_t first, int16_t second) {
  const int16_t pair[2] = {first, second};
  int32_t both;
  memcpy(&both, pair, sizeof both);
  return both;
}
inline I16 load_words(const int8_t* lo, const int8_t* hi) {
  I16 r;
  for (int i = 0; i < kLanes; ++i) {
    const int8_t* pair = i < 8 ? lo + 2 * i : hi + 2 * (i - 8);
    r.v[i] = pack_words(pair[0], pair[1]);
  }
  return r;
}
inline I16 load_words(const int8_t* p) { return load_words(p, p + 16); }
inline I16 load_words(const uint16_t* lo, const uint16_t* hi) {
  I16 r;
  memcpy(r.v, lo, sizeof r.v / 2);
  memcpy(r.v + 8, hi, sizeof r.v / 2);
  return r;
}
inline I16 load_words(const uint16_t* p) { return load_words(p, p + 16); }
inline I16 splat_int(int32_t x) {
  I16 r;
  for (int32_t& lane : r.v) lane = x;
  return r;
}
inline I16 and_bits(I16 a, I16 b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] &= b.v[i];
  return a;
}
inline I16 dot_words(I16 sum, I16 a, I16 b) {
  int16_t x[2 * kLanes], y[2 * kLanes];
  memcpy(x, a.v, sizeof x);
  memcpy(y, b.v, sizeof y);
  for (int i = 0; i < kLanes; ++i) sum.v[i] += x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
  return sum;
}
inline void store_words(int16_t* p, I16 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(a.v[i]);
}

#endif

// One pair in all lanes.
template <class Word>
inline I16 splat_words(const Word* pair) {
  static_assert(sizeof(Word) == 2);
  int32_t both;
  memcpy(&both, pair, sizeof both);
  return splat_int(both);
}

#if !defined(OCTAVO_ISA_avx512)

inline Pairs widen_words(I16 words) {
#if defined(OCTAVO_ISA_avx2)
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {
      {_mm256_castsi256_ps(_mm256_slli_epi32(words.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(words.hi, 16))},
      {_mm256_castsi256_ps(_mm256_and_si256(words.lo, upper)), _mm256_castsi256_ps(_mm256_and_si256(words.hi, upper))}};
#else
  uint16_t pairs[2 * kLanes];
  memcpy(pairs, words.v, sizeof pairs);
  Pairs r;
  for (int i = 0; i < kLanes; ++i) {
    r.first.v[i] = bf16_to_float(pairs[2 * i]);
    r.second.v[i] = bf16_to_float(pairs[2 * i + 1]);
  }
  return r;
#endif
}
inline F16 dot_bf16(F16 sum, I16 a, I16 b) {
  const Pairs x = widen_words(a), y = widen_words(b);
  return fma(x.first, y.first, fma(x.second, y.second, sum));
}
inline void store_bf16(uint16_t* p, F16 a) {
  float values[kLanes];
  store(values, a);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(values[i]);
}

#endif

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
