// Loads and stores of interleaved pairs (x0 y0 x1 y1 ...) as two vectors: rotary pairs, and two head dimensions of the
// K cache.
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
inline Pairs split_bf16(__m512i pairs) {
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
}
inline Pairs load_pairs(const uint16_t* lo, const uint16_t* hi) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lo));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(hi));
  return split_bf16(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
}
inline Pairs load_pairs(const uint16_t* p) { return split_bf16(_mm512_loadu_si512(p)); }
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
inline HalfPairs load_half_pairs(const uint16_t* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
template <class T>
inline Pairs load_pairs(const T* lo, const T* hi) {
  const HalfPairs a = load_half_pairs(lo), b = load_half_pairs(hi);
  return {{a.first, b.first}, {a.second, b.second}};
}
inline Pairs load_pairs(const uint16_t* p) { return load_pairs(p, p + 16); }
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

inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return bf16_to_float(x); }
template <class T>
inline Pairs load_pairs(const T* lo, const T* hi) {
  Pairs r;
  for (int i = 0; i < kLanes; ++i) {
    const T* pair = i < 8 ? lo + 2 * i : hi + 2 * (i - 8);
    r.first.v[i] = widen(pair[0]);
    r.second.v[i] = widen(pair[1]);
  }
  return r;
}
inline Pairs load_pairs(const uint16_t* p) { return load_pairs(p, p + 16); }
inline void store_pairs(float* p, Pairs a) {
  for (int i = 0; i < kLanes; ++i) {
    p[2 * i] = a.first.v[i];
    p[2 * i + 1] = a.second.v[i];
  }
}

#endif

inline Pairs load_pairs(const float* p) { return load_pairs(p, p + 16); }

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
