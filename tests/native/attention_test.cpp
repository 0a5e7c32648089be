// Attention against double precision, and the promise that its bits depend on nothing but the row: not on the tokens
// computed with it, the block size, the instruction set, or what lies in memory that the row does not see.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "core/dispatch.h"
#include "core/fpu.h"
#include "kernels/half.h"
#include "kernels/kernels.h"

namespace {

using namespace octavo;

struct Shape {
  int num_heads, kv_heads, head_dim, length, window;
};

std::string describe(const Shape& s, const char* isa, KvFormat format, int block_size) {
  return std::to_string(s.num_heads) + "/" + std::to_string(s.kv_heads) + " heads of " + std::to_string(s.head_dim) +
         ", length " + std::to_string(s.length) + ", window " + std::to_string(s.window) + ", " + isa + ", format " +
         std::to_string(static_cast<int>(format)) + ", block " + std::to_string(block_size);
}

std::vector<float> random_values(std::mt19937& rng, size_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& v : values) v = normal(rng);
  return values;
}

// A cache whose unwritten elements are NaN and whose blocks are in a shuffled order, without the blocks that the window
// has left.
struct Cache {
  std::vector<uint32_t> memory;
  std::vector<int32_t> table;
  KvCache kv;

  Cache(const Kernels& kernels, const Shape& s, KvFormat format, int block_size, const std::vector<float>& k,
        const std::vector<float>& v) {
    const int blocks = (s.length + block_size - 1) / block_size;
    const int64_t bytes = (blocks + 1) * s.kv_heads * kv_head_bytes(format, block_size, s.head_dim);
    memory.assign(static_cast<size_t>(bytes) / sizeof(uint32_t), 0xffffffffu);
    kv = {format, block_size, s.kv_heads, s.head_dim, memory.data()};
    for (int i = 0; i < blocks; ++i) table.push_back((i * 7 + 3) % blocks + 1);
    if (blocks % 7 == 0)
      for (int i = 0; i < blocks; ++i) table[i] = blocks - i;
    const size_t stride = static_cast<size_t>(s.kv_heads) * s.head_dim;
    for (int p = 0; p < s.length; ++p)
      kernels.kv_write(kv, &k[p * stride], &v[p * stride], table[p / block_size], p % block_size);
  }
};

// All tokens of the row from `first` on, `chunk` at a time.
std::vector<float> attend(const Kernels& kernels, const Shape& s, const Cache& cache, const std::vector<float>& q,
                          int first, int chunk) {
  const int tokens = s.length - first;
  std::vector<int32_t> positions(tokens);
  for (int i = 0; i < tokens; ++i) positions[i] = first + i;
  std::vector<int32_t> table = cache.table;
  if (s.window > 0)  // blocks that no token computed here sees
    for (int b = 0; b < (first - s.window + 1) / cache.kv.block_size; ++b) table[b] = -1;
  std::vector<float> out(static_cast<size_t>(tokens) * s.num_heads * s.head_dim);
  AttendArgs args{cache.kv,
                  q.data() + static_cast<size_t>(first) * s.num_heads * s.head_dim,
                  out.data(),
                  s.num_heads,
                  1.0f / std::sqrt(static_cast<float>(s.head_dim)),
                  s.window,
                  positions.data(),
                  table.data(),
                  0,
                  0,
                  0};
  for (int begin = 0; begin < tokens; begin += chunk) {
    for (args.kv_head = 0; args.kv_head < s.kv_heads; ++args.kv_head) {
      args.token_begin = begin;
      args.token_end = std::min(begin + chunk, tokens);
      kernels.attend(args);
    }
  }
  return out;
}

// What the cache makes of K or V: heads of `head_dim` values.
std::vector<float> rounded(KvFormat format, std::vector<float> x, int head_dim) {
  if (format == KvFormat::kBF16)
    for (float& value : x) value = bf16_to_float(float_to_bf16(value));
  if (format == KvFormat::kI8) {
    for (size_t head = 0; head < x.size(); head += head_dim) {
      float most = 0;
      for (int d = 0; d < head_dim; ++d) most = std::max(most, std::abs(x[head + d]));
      for (int d = 0; d < head_dim; ++d)
        x[head + d] = most == 0 ? 0 : most / 127.0f * std::nearbyint(x[head + d] * (127.0f / most));
    }
  }
  return x;
}

std::vector<double> reference(const Shape& s, const std::vector<float>& q, const std::vector<float>& k,
                              const std::vector<float>& v, int position) {
  std::vector<double> out;
  for (int h = 0; h < s.num_heads; ++h) {
    const int kv_head = h / (s.num_heads / s.kv_heads);
    const int begin = s.window > 0 ? std::max(0, position - s.window + 1) : 0;
    const auto at = [&](const std::vector<float>& x, int p, int d) {
      return static_cast<double>(x[(static_cast<size_t>(p) * s.kv_heads + kv_head) * s.head_dim + d]);
    };
    std::vector<double> weights;
    double most = -1e300, total = 0;
    for (int p = begin; p <= position; ++p) {
      double score = 0;
      for (int d = 0; d < s.head_dim; ++d)
        score +=
            static_cast<double>(q[(static_cast<size_t>(position) * s.num_heads + h) * s.head_dim + d]) * at(k, p, d);
      weights.push_back(score / std::sqrt(static_cast<double>(s.head_dim)));
      most = std::max(most, weights.back());
    }
    for (double& w : weights) total += w = std::exp(w - most);
    for (int d = 0; d < s.head_dim; ++d) {
      double sum = 0;
      for (int p = begin; p <= position; ++p) sum += weights[p - begin] * at(v, p, d);
      out.push_back(sum / total);
    }
  }
  return out;
}

// The last token of the row, split by split.
std::vector<float> attend_in_splits(const Kernels& kernels, const Shape& s, const Cache& cache,
                                    const std::vector<float>& q) {
  const int64_t size = attend_partial_size(s.head_dim), heads = s.num_heads / s.kv_heads;
  const int32_t position = s.length - 1;
  std::vector<float> out(static_cast<size_t>(s.num_heads) * s.head_dim);
  for (int kv_head = 0; kv_head < s.kv_heads; ++kv_head) {
    std::vector<float> partials;
    const int splits = position / kKvSplit + 1;
    partials.resize(static_cast<size_t>(splits * heads * size));
    for (int split = splits - 1; split >= 0; --split) {  // the order does not matter
      AttendArgs args{cache.kv,
                      q.data() + static_cast<size_t>(position) * s.num_heads * s.head_dim,
                      nullptr,
                      s.num_heads,
                      1.0f / std::sqrt(static_cast<float>(s.head_dim)),
                      s.window,
                      &position,
                      cache.table.data(),
                      0,
                      1,
                      kv_head};
      args.partials = partials.data() + split * heads * size;
      args.split = split * kKvSplit;
      kernels.attend(args);
    }
    for (int64_t h = 0; h < heads; ++h)
      kernels.merge_splits(&partials[h * size], splits, heads * size, s.head_dim,
                           &out[(kv_head * heads + h) * s.head_dim]);
  }
  return out;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void check_shape(const Shape& s) {
  std::mt19937 rng(1);
  const size_t kv_stride = static_cast<size_t>(s.kv_heads) * s.head_dim;
  const size_t q_stride = static_cast<size_t>(s.num_heads) * s.head_dim;
  const std::vector<float> q = random_values(rng, s.length * q_stride);
  const std::vector<float> k = random_values(rng, s.length * kv_stride);
  const std::vector<float> v = random_values(rng, s.length * kv_stride);
  for (const KvFormat format : {KvFormat::kF32, KvFormat::kBF16, KvFormat::kI8}) {
    const std::vector<float> cached_k = rounded(format, k, s.head_dim), cached_v = rounded(format, v, s.head_dim);
    // With bf16 the weights are rounded to bf16; with 8 bits, queries and weights are rounded to 16-bit integers.
    const double tolerance = format == KvFormat::kF32 ? 2e-6 : format == KvFormat::kBF16 ? 4e-3 : 2e-4;
    const std::vector<float> read_q = format == KvFormat::kBF16 ? rounded(format, q, s.head_dim) : q;
    std::vector<float> first_result;
    for (const std::string& isa : available_isas()) {
      const Kernels& kernels = kernels_for(isa);
      for (const int block_size : {8, 16, 32}) {
        const Cache cache(kernels, s, format, block_size, k, v);
        const std::string where = describe(s, isa.c_str(), format, block_size);
        const std::vector<float> all = attend(kernels, s, cache, q, 0, s.length);
        if (first_result.empty()) {
          first_result = all;
          for (int p = 0; p < s.length; p += 1 + s.length / 7) {
            const std::vector<double> expected = reference(s, read_q, cached_k, cached_v, p);
            for (size_t i = 0; i < q_stride; ++i)
              CHECK_MSG(std::abs(all[p * q_stride + i] - expected[i]) < tolerance * (1 + std::abs(expected[i])), where);
          }
        }
        CHECK_MSG(same_bits(all, first_result), where);
        CHECK_MSG(same_bits(attend(kernels, s, cache, q, 0, 1), all), where);
        CHECK_MSG(same_bits(attend(kernels, s, cache, q, 0, 7), all), where);
        const int last = s.length - 1;
        CHECK_MSG(same_bits(attend(kernels, s, cache, q, last, 1), {all.end() - q_stride, all.end()}), where);
        CHECK_MSG(same_bits(attend_in_splits(kernels, s, cache, q), {all.end() - q_stride, all.end()}), where);
      }
    }
  }
}

}  // namespace

int main() {
  const KernelFpu fpu;
  for (const Shape& shape :
       {Shape{9, 3, 64, 300, 0}, Shape{4, 4, 32, 40, 0}, Shape{7, 1, 48, 33, 0}, Shape{8, 2, 80, 17, 0},
        Shape{4, 1, 256, 20, 0}, Shape{70, 1, 32, 19, 0}, Shape{2, 1, 128, 1, 0}, Shape{6, 2, 64, 300, 20},
        Shape{2, 2, 32, 300, 1}, Shape{3, 1, 32, 70, 5}, Shape{1, 1, 32, 530, 260}})
    check_shape(shape);
  return octavo::test::failures();
}
