// Sixteen float lanes, the unit of all kernel arithmetic, with one implementation per instruction set.
//
// Every operation has the same result in every lane in every build: correctly rounded IEEE operations, explicit fma,
// one fixed reduction tree. A kernel written against F16 therefore gives the same bits everywhere. Denormals count as
// zero: threads that run kernels set FTZ and DAZ (core/fpu.h), which is what vdpbf16ps does regardless.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/half.h"

#if defined(OCTAVO_ISA_avx2) || defined(OCTAVO_ISA_avx512)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"              // clang does not know the next
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarm about GCC's own intrinsics (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace octavo {
namespace OCTAVO_ISA {
namespace {

inline constexpr int kLanes = 16;

#if defined(OCTAVO_ISA_avx512)

struct F16 {
  __m512 v;
};
struct I16 {
  __m512i v;
};

inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// x86 semantics: the second operand where either is NaN or both are zero.
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
inline F16 neg(F16 a) {
  return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(INT32_MIN)))};
}
// Rounds to the nearest integer, ties to even; |a| below 2^31.
inline I16 round_int(F16 a) { return {_mm512_cvt_roundps_epi32(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I16 load_int(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_int(int32_t* p, I16 a) { _mm512_storeu_si512(p, a.v); }
// 2^n for n in -126..127.
inline F16 exp2_int(I16 n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}
// b where lane index < n, a elsewhere.
inline F16 first_lanes(int n, F16 b, F16 a) {
  const __mmask16 mask = static_cast<__mmask16>(n >= 16 ? 0xffff : (1 << n) - 1);
  return {_mm512_mask_blend_ps(mask, a.v, b.v)};
}
// b where x < y, a elsewhere (also where unordered).
inline F16 where_less(F16 x, F16 y, F16 b, F16 a) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), a.v, b.v)};
}
// Bit i is set where a >= b in lane i (not where unordered).
inline uint32_t mask_at_least(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }

#elif defined(OCTAVO_ISA_avx2)

struct F16 {
  __m256 lo, hi;
};
struct I16 {
  __m256i lo, hi;
};

inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline F16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F16 abs(F16 a) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MAX));
  return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
inline F16 neg(F16 a) {
  const __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN));
  return {_mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign)};
}
inline I16 round_int(F16 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_cvtps_epi32(_mm256_round_ps(a.lo, kMode)), _mm256_cvtps_epi32(_mm256_round_ps(a.hi, kMode))};
}
inline F16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I16 load_int(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void store_int(int32_t* p, I16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
inline F16 exp2_int(I16 n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.lo, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.hi, bias), 23))};
}
inline F16 first_lanes(int n, F16 b, F16 a) {
  const __m256i count = _mm256_set1_epi32(n);
  const __m256 lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
  const __m256 hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)));
  return {_mm256_blendv_ps(a.lo, b.lo, lo), _mm256_blendv_ps(a.hi, b.hi, hi)};
}
inline F16 where_less(F16 x, F16 y, F16 b, F16 a) {
  return {_mm256_blendv_ps(a.lo, b.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(a.hi, b.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_LT_OQ))};
}
inline uint32_t mask_at_least(F16 a, F16 b) {
  const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ));
  const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
  return static_cast<uint32_t>(lo) | static_cast<uint32_t>(hi) << 8;
}

#else  // portable: the definition

struct F16 {
  float v[kLanes];
};
struct I16 {
  int32_t v[kLanes];
};

inline F16 splat(float x) {
  F16 r;
  for (float& lane : r.v) lane = x;
  return r;
}
inline F16 zero() { return splat(0.0f); }
inline F16 load(const float* p) {
  F16 r;
  memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store(float* p, F16 a) { memcpy(p, a.v, sizeof a.v); }
inline F16 load_f16(const uint16_t* p) {
  F16 r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = f16_to_float(p[i]);
  return r;
}
#define OCTAVO_LANEWISE(expression)                       \
  F16 r;                                                  \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expression); \
  return r
inline F16 add(F16 a, F16 b) { OCTAVO_LANEWISE(a.v[i] + b.v[i]); }
inline F16 sub(F16 a, F16 b) { OCTAVO_LANEWISE(a.v[i] - b.v[i]); }
inline F16 mul(F16 a, F16 b) { OCTAVO_LANEWISE(a.v[i] * b.v[i]); }
inline F16 div(F16 a, F16 b) { OCTAVO_LANEWISE(a.v[i] / b.v[i]); }
inline F16 fma(F16 a, F16 b, F16 c) { OCTAVO_LANEWISE(fmaf(a.v[i], b.v[i], c.v[i])); }
inline F16 max(F16 a, F16 b) { OCTAVO_LANEWISE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F16 min(F16 a, F16 b) { OCTAVO_LANEWISE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F16 abs(F16 a) { OCTAVO_LANEWISE(fabsf(a.v[i])); }
inline F16 neg(F16 a) { OCTAVO_LANEWISE(-a.v[i]); }
inline F16 first_lanes(int n, F16 b, F16 a) { OCTAVO_LANEWISE(i < n ? b.v[i] : a.v[i]); }
inline F16 where_less(F16 x, F16 y, F16 b, F16 a) { OCTAVO_LANEWISE(x.v[i] < y.v[i] ? b.v[i] : a.v[i]); }
inline F16 to_float(I16 a) { OCTAVO_LANEWISE(static_cast<float>(a.v[i])); }
#undef OCTAVO_LANEWISE
inline uint32_t mask_at_least(F16 a, F16 b) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
  return mask;
}
inline I16 round_int(F16 a) {
  I16 r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<int32_t>(rintf(a.v[i]));
  return r;
}
inline I16 load_int(const int32_t* p) {
  I16 r;
  memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store_int(int32_t* p, I16 a) { memcpy(p, a.v, sizeof a.v); }
inline F16 exp2_int(I16 n) {
  F16 r;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = static_cast<uint32_t>(n.v[i] + 127) << 23;
    memcpy(&r.v[i], &bits, sizeof bits);
  }
  return r;
}

#endif

// Sum and maximum of all lanes by one tree: lane i with lane i + 8, then + 4, + 2, + 1.
#if defined(OCTAVO_ISA_avx512) || defined(OCTAVO_ISA_avx2)

inline __m256 lower_half(F16 a) {
#if defined(OCTAVO_ISA_avx512)
  return _mm512_castps512_ps256(a.v);
#else
  return a.lo;
#endif
}
inline __m256 upper_half(F16 a) {
#if defined(OCTAVO_ISA_avx512)
  return _mm512_extractf32x8_ps(a.v, 1);
#else
  return a.hi;
#endif
}
inline float reduce_add(F16 a) {
  const __m256 eight = _mm256_add_ps(lower_half(a), upper_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(F16 a) {
  const __m256 eight = _mm256_max_ps(lower_half(a), upper_half(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#else

inline float reduce_add(F16 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] + a.v[i + half];
  return a.v[0];
}
inline float reduce_max(F16 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}

#endif

// e^x / 2^n for n near x / ln 2: Cody-Waite reduction by ln 2 in two parts, then a polynomial of degree 6 (coefficients
// 1/n! are accurate enough on |r| <= ln2/2).
inline F16 exp_polynomial(F16 x, F16 n) {
  F16 r = fma(n, splat(-0.693145751953125f), x);
  r = fma(n, splat(-1.42860682030941723e-6f), r);
  F16 p = splat(1.0f / 720.0f);
  p = fma(p, r, splat(1.0f / 120.0f));
  p = fma(p, r, splat(1.0f / 24.0f));
  p = fma(p, r, splat(1.0f / 6.0f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  return fma(p, r, splat(1.0f));
}

// e^x within 2 ulp for x in [-87, 88]; 0 below -87 (also for -inf), values above 88 are clamped to e^88. NaN gives a
// finite value.
inline F16 exp(F16 x) {
  const F16 clamped = min(max(x, splat(-87.0f)), splat(88.0f));
  const I16 n = round_int(mul(clamped, splat(1.44269504088896341f)));
  return where_less(x, splat(-87.0f), zero(), mul(exp_polynomial(clamped, to_float(n)), exp2_int(n)));
}

// The bits of exp for x <= 0, with less work; but NaN for NaN.
inline F16 exp_nonpositive(F16 x) {
#if defined(OCTAVO_ISA_avx512)
  const F16 n = {_mm512_roundscale_ps(_mm512_mul_ps(x.v, _mm512_set1_ps(1.44269504088896341f)),
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
#else
  const I16 exponent = round_int(mul(max(x, splat(-87.0f)), splat(1.44269504088896341f)));
  const F16 n = to_float(exponent);
#endif
  const F16 p = exp_polynomial(x, n);
#if defined(OCTAVO_ISA_avx512)
  return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ), p.v, n.v)};
#else
  return where_less(x, splat(-87.0f), zero(), mul(p, exp2_int(exponent)));
#endif
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
