#include "core/bench.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <stdexcept>
#include <thread>

#include "core/fpu.h"

namespace octavo {
namespace {

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

class Clock {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Keeps the compiler from dropping what was computed.
std::atomic<std::uint64_t> sink{0};

std::vector<float> random_floats(std::size_t count, std::uint32_t seed) {
  std::mt19937 bits(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(static_cast<std::int32_t>(bits())) * 0x1p-31f;
  return values;
}

// --- reading. `streams` sequences of `bytes` each, `bytes` apart.

using Reader = std::uint64_t (*)(const std::uint8_t* at, std::size_t bytes, int streams);

// How far ahead of a sequence its lines are asked for: further than the hardware looks within a page, and across its
// end.
constexpr std::size_t kAhead = 2048;

std::uint64_t read_plain(const std::uint8_t* at, std::size_t bytes, int streams) {
  std::uint64_t sum = 0;
  for (std::size_t offset = 0; offset < bytes; offset += 64)
    for (int s = 0; s < streams; ++s) {
      const auto* words = reinterpret_cast<const std::uint64_t*>(at + static_cast<std::size_t>(s) * bytes + offset);
      for (int i = 0; i < 8; ++i) sum ^= words[i];
    }
  return sum;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) std::uint64_t read_avx2(const std::uint8_t* at, std::size_t bytes, int streams) {
  __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (std::size_t offset = 0; offset < bytes; offset += 64)
    for (int s = 0; s < streams; ++s) {
      const std::uint8_t* line = at + static_cast<std::size_t>(s) * bytes + offset;
      _mm_prefetch(reinterpret_cast<const char*>(line + kAhead), _MM_HINT_T0);
      for (int i = 0; i < 2; ++i)
        sum[i] = _mm256_xor_si256(sum[i], _mm256_load_si256(reinterpret_cast<const __m256i*>(line) + i));
    }
  alignas(32) std::uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), _mm256_xor_si256(sum[0], sum[1]));
  return words[0] ^ words[1] ^ words[2] ^ words[3];
}

__attribute__((target("avx512f"))) std::uint64_t read_avx512(const std::uint8_t* at, std::size_t bytes, int streams) {
  __m512i sum = _mm512_setzero_si512();
  for (std::size_t offset = 0; offset < bytes; offset += 64)
    for (int s = 0; s < streams; ++s) {
      const std::uint8_t* line = at + static_cast<std::size_t>(s) * bytes + offset;
      _mm_prefetch(reinterpret_cast<const char*>(line + kAhead), _MM_HINT_T0);
      sum = _mm512_xor_si512(sum, _mm512_load_si512(line));
    }
  alignas(64) std::uint64_t words[8];
  _mm512_store_si512(words, sum);
  return words[0] ^ words[1] ^ words[2] ^ words[3] ^ words[4] ^ words[5] ^ words[6] ^ words[7];
}
#endif

Reader fastest_reader() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return &read_avx512;
  if (__builtin_cpu_supports("avx2")) return &read_avx2;
#endif
  return &read_plain;
}

// --- peaks. Each loop does kChains independent multiply-adds, enough to hide their latency.

constexpr int kChains = 12;

struct PeakLoop {
  void (*run)(std::int64_t loops);
  std::int64_t operations;  // per multiply-add instruction, over all lanes
};

// Stores the chains, so that they must be computed.
template <typename Vector>
void consume(const Vector (&chains)[kChains]) {
  for (const Vector& chain : chains) asm volatile("" : : "m"(chain));
}

void f32_plain(std::int64_t loops) {
  using Vector = float __attribute__((vector_size(16)));
  Vector chains[kChains] = {}, factor = Vector{} + 0.5f;
  asm volatile("" : "+m"(factor));
  for (std::int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (Vector& chain : chains) chain = chain * factor + factor;
  }
  consume(chains);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void f32_avx2(std::int64_t loops) {
  __m256 chains[kChains], factor = _mm256_set1_ps(0.5f);
  for (__m256& chain : chains) chain = factor;
  asm volatile("" : "+x"(factor));
  for (std::int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (__m256& chain : chains) chain = _mm256_fmadd_ps(factor, factor, chain);
  }
  consume(chains);
}

__attribute__((target("avx2"))) void int8_avx2(std::int64_t loops) {
  __m256i chains[kChains], levels = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
  for (__m256i& chain : chains) chain = _mm256_setzero_si256();
  for (std::int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (__m256i& chain : chains) {
      asm volatile("" : "+x"(levels));  // else the products leave the loop
      chain = _mm256_add_epi32(chain, _mm256_madd_epi16(_mm256_maddubs_epi16(levels, levels), ones));
    }
  }
  consume(chains);
}

__attribute__((target("avx512f"))) void f32_avx512(std::int64_t loops) {
  __m512 chains[kChains], factor = _mm512_set1_ps(0.5f);
  for (__m512& chain : chains) chain = factor;
  asm volatile("" : "+v"(factor));
  for (std::int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (__m512& chain : chains) chain = _mm512_fmadd_ps(factor, factor, chain);
  }
  consume(chains);
}

__attribute__((target("avx512f,avx512vnni"))) void int8_avx512(std::int64_t loops) {
  __m512i chains[kChains], levels = _mm512_set1_epi8(3);
  for (__m512i& chain : chains) chain = _mm512_setzero_si512();
  asm volatile("" : "+v"(levels));
  for (std::int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (__m512i& chain : chains) chain = _mm512_dpbusd_epi32(chain, levels, levels);
  }
  consume(chains);
}

__attribute__((target("avx512f,avx512bf16"))) void bf16_avx512(std::int64_t loops) {
  __m512 chains[kChains];
  for (__m512& chain : chains) chain = _mm512_setzero_ps();
  __m512bh factor = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f));
  asm volatile("" : "+v"(factor));
  for (std::int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (__m512& chain : chains) chain = _mm512_dpbf16_ps(chain, factor, factor);
  }
  consume(chains);
}
#endif

PeakLoop fastest_loop(Peak peak) {
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f"), avx2 = __builtin_cpu_supports("avx2");
  switch (peak) {
    case Peak::kInt8:
      if (avx512 && __builtin_cpu_supports("avx512vnni")) return {&int8_avx512, 128};
      if (avx2) return {&int8_avx2, 64};
      return {nullptr, 0};
    case Peak::kBf16:
      if (avx512 && __builtin_cpu_supports("avx512bf16")) return {&bf16_avx512, 64};
      return {nullptr, 0};
    case Peak::kF32:
      if (avx512) return {&f32_avx512, 32};
      if (avx2 && __builtin_cpu_supports("fma")) return {&f32_avx2, 16};
      return {&f32_plain, 8};
  }
#endif
  return peak == Peak::kF32 ? PeakLoop{&f32_plain, 8} : PeakLoop{nullptr, 0};
}

// One loop that ends when all threads have taken part in it. With empty tiles alone the caller would do them all before
// a helper sees the first.
void meet(Pool& pool) {
  const std::int32_t threads = pool.threads();
  std::atomic<std::int32_t> present{0};
  pool.on_every_thread([&](int) {
    present.fetch_add(1);
    for (std::int32_t spins = 0; present.load(std::memory_order_acquire) < threads; ++spins)
      if (spins > 1000) std::this_thread::yield();
  });
}

}  // namespace

double time_dispatch(Pool& pool, std::int64_t loops) {
  require(loops >= 1, "at least one loop must be timed");
  meet(pool);
  const Clock clock;
  for (std::int64_t i = 0; i < loops; ++i) meet(pool);
  return clock.seconds() / static_cast<double>(loops);
}

double time_wake(Pool& pool, double idle_s) {
  meet(pool);
  std::this_thread::sleep_for(std::chrono::duration<double>(idle_s));
  const Clock clock;
  meet(pool);
  return clock.seconds();
}

ReadBuffer::ReadBuffer(std::size_t bytes, bool huge_pages)
    : bytes_(bytes), memory_(bytes, huge_pages ? Mapping::Pages::kHuge : Mapping::Pages::kOrdinary) {
  require(bytes >= 64, "a buffer needs at least 64 bytes");
  std::fill_n(memory_.data(), bytes_, std::uint8_t{0x5a});
}

double ReadBuffer::time_read(Pool& pool, std::size_t tile_bytes, std::int64_t repeats, int streams) const {
  require(streams >= 1 && streams <= 16 && repeats >= 1, "streams must be in 1..16 and repeats positive");
  require(tile_bytes >= 64 && tile_bytes % (64 * static_cast<std::size_t>(streams)) == 0 && bytes_ % tile_bytes == 0,
          "tile_bytes must be a multiple of 64 * streams that divides the buffer");
  const Reader reader = fastest_reader();
  const Clock clock;
  pool.parallel_for(static_cast<std::int32_t>(bytes_ / tile_bytes), [&](std::int32_t tile) {
    std::uint64_t sum = 0;
    for (std::int64_t i = 0; i < repeats; ++i)
      sum ^= reader(memory_.data() + static_cast<std::size_t>(tile) * tile_bytes,
                    tile_bytes / static_cast<std::size_t>(streams), streams);
    sink.fetch_xor(sum, std::memory_order_relaxed);
  });
  return clock.seconds();
}

double measure_peak(Pool& pool, Peak peak, std::int64_t loops) {
  require(loops >= 1, "at least one loop must be timed");
  const PeakLoop loop = fastest_loop(peak);
  if (loop.run == nullptr) return 0;
  const KernelFpu fpu;
  const Clock clock;
  pool.on_every_thread([&](int) { loop.run(loops); });
  return static_cast<double>(loop.operations * kChains * loops) * pool.threads() / clock.seconds();
}

void fill_cache(Pool& pool, const Kernels& kernels, const KvStore& cache) {
  for (std::int32_t g = 0; g < cache.num_groups(); ++g) {
    const KvGroup& group = cache.group(g);
    const auto columns = static_cast<std::size_t>(group.num_kv_heads) * static_cast<std::size_t>(group.head_dim);
    const std::vector<float> values = random_floats(2 * columns, 2);
    pool.parallel_for(group.num_blocks, [&](std::int32_t block) {
      const KernelFpu fpu;
      for (const std::int32_t layer : group.layers)
        for (std::int32_t offset = 0; offset < cache.block_size(); ++offset)
          kernels.kv_write(cache.cache(layer), values.data(), values.data() + columns, block, offset);
    });
  }
}

double time_row_op(const Kernels& kernels, const std::string& name, std::int64_t columns, std::int64_t head_dim,
                   std::int64_t repeats) {
  require(columns >= 1 && columns <= (std::int64_t{1} << 24) && repeats >= 1, "columns and repeats must be positive");
  require(head_dim >= 2 && head_dim % 2 == 0, "head_dim must be even");
  const std::vector<float> x = random_floats(static_cast<std::size_t>(columns), 5);
  const std::vector<float> y = random_floats(static_cast<std::size_t>(std::max(columns, head_dim)), 6);
  std::vector<float> out(static_cast<std::size_t>(columns));
  std::vector<QuantBlock> blocks(static_cast<std::size_t>(columns / kQuantBlock + 1));
  std::vector<std::uint16_t> halves(static_cast<std::size_t>(columns));
  const KernelFpu fpu;
  const auto timed = [&](const auto& row) {
    row();
    const Clock clock;
    for (std::int64_t i = 0; i < repeats; ++i) row();
    return clock.seconds() / static_cast<double>(repeats);
  };
  if (name == "rms_norm") return timed([&] { kernels.rms_norm(x.data(), y.data(), columns, 1e-5f, out.data()); });
  if (name == "add") return timed([&] { kernels.add(x.data(), y.data(), columns, out.data()); });
  if (name == "silu_mul") return timed([&] { kernels.silu_mul(x.data(), y.data(), columns, out.data()); });
  if (name == "to_bf16") return timed([&] { kernels.to_bf16_row(x.data(), columns, halves.data()); });
  if (name == "quantize") {
    require(columns % kQuantBlock == 0, "rows to quantize are multiples of 32");
    return timed([&] { kernels.quantize_row(x.data(), columns, blocks.data()); });
  }
  require(name == "rope", "no row operation is named " + name);
  require(columns % head_dim == 0, "columns are not heads of that size");
  return timed([&] {
    kernels.rope(x.data(), columns / head_dim, head_dim, head_dim, false, y.data(), y.data() + head_dim / 2,
                 out.data());
  });
}

}  // namespace octavo
