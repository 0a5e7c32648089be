// RMSNorm, addition, gated activation and rotary embedding of one row.
#include "kernels/kernels.h"
#include "kernels/ops.h"
#include "kernels/pairs.h"
#include "kernels/simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// The last n < 16 elements, zero beyond them, and the store that leaves memory beyond them alone.
inline F16 load_tail(const float* p, int64_t n) {
  float t[kLanes] = {};
  memcpy(t, p, static_cast<size_t>(n) * sizeof(float));
  return load(t);
}
inline void store_tail(float* p, int64_t n, F16 a) {
  float t[kLanes];
  store(t, a);
  memcpy(p, t, static_cast<size_t>(n) * sizeof(float));
}

template <class Body>
inline void for_each_vector(const float* a, const float* b, int64_t n, float* y, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, body(load(a + i), load(b + i)));
  if (i < n) store_tail(y + i, n - i, body(load_tail(a + i, n - i), load_tail(b + i, n - i)));
}

inline F16 silu_times(F16 gate, F16 up) { return mul(div(gate, add(splat(1.0f), exp(neg(gate)))), up); }

// (x, y) turned by the angle: x cos - y sin, x sin + y cos, each with one product rounded before the fma.
inline Pairs rotate(Pairs p, F16 cos, F16 sin) {
  return {fma(p.first, cos, neg(mul(p.second, sin))), fma(p.first, sin, mul(p.second, cos))};
}

inline void rotate_interleaved(const float* x, int64_t pairs, const float* cos, const float* sin, float* y) {
  int64_t i = 0;
  for (; i + kLanes <= pairs; i += kLanes)
    store_pairs(y + 2 * i, rotate(load_pairs(x + 2 * i), load(cos + i), load(sin + i)));
  if (i == pairs) return;
  const int64_t rest = pairs - i;
  float t[2 * kLanes] = {};
  memcpy(t, x + 2 * i, static_cast<size_t>(2 * rest) * sizeof(float));
  store_pairs(t, rotate(load_pairs(t), load_tail(cos + i, rest), load_tail(sin + i, rest)));
  memcpy(y + 2 * i, t, static_cast<size_t>(2 * rest) * sizeof(float));
}

inline void rotate_halves(const float* x, int64_t pairs, const float* cos, const float* sin, float* y) {
  int64_t i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    const Pairs r = rotate({load(x + i), load(x + pairs + i)}, load(cos + i), load(sin + i));
    store(y + i, r.first);
    store(y + pairs + i, r.second);
  }
  if (i == pairs) return;
  const int64_t rest = pairs - i;
  const Pairs r = rotate({load_tail(x + i, rest), load_tail(x + pairs + i, rest)}, load_tail(cos + i, rest),
                         load_tail(sin + i, rest));
  store_tail(y + i, rest, r.first);
  store_tail(y + pairs + i, rest, r.second);
}

}  // namespace

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* y) {
  F16 squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F16 v = load(x + i);
    squares = fma(v, v, squares);
  }
  if (i < n) {
    const F16 v = load_tail(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const F16 factor = splat(1.0f / sqrtf(reduce_add(squares) / static_cast<float>(n) + eps));
  for_each_vector(x, weight, n, y, [factor](F16 v, F16 w) { return mul(mul(v, factor), w); });
}

void add_rows(const float* a, const float* b, int64_t n, float* y) {
  for_each_vector(a, b, n, y, [](F16 u, F16 v) { return add(u, v); });
}

void silu_mul(const float* gate, const float* up, int64_t n, float* y) { for_each_vector(gate, up, n, y, silu_times); }

void silu_mul_panels(const float* x, int64_t panels, float* y) {
  for (int64_t p = 0; p < panels; ++p, x += 2 * kPanel) store(y + p * kPanel, silu_times(load(x), load(x + kPanel)));
}

void rope(const float* x, int64_t heads, int64_t head_dim, int64_t rotated_dim, bool interleaved, const float* cos,
          const float* sin, float* y) {
  for (int64_t h = 0; h < heads; ++h, x += head_dim, y += head_dim) {
    if (interleaved)
      rotate_interleaved(x, rotated_dim / 2, cos, sin, y);
    else
      rotate_halves(x, rotated_dim / 2, cos, sin, y);
    if (y != x && rotated_dim < head_dim)
      memcpy(y + rotated_dim, x + rotated_dim, static_cast<size_t>(head_dim - rotated_dim) * sizeof(float));
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
