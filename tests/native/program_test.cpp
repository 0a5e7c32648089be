// A recorded program on a tiny model with random weights: the same bits whatever the instruction set, threads, chunks,
// batch neighbours and block size; and every wrong recording or batch is refused before anything is read.
#include "core/program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "core/decode.h"
#include "core/dispatch.h"

namespace {

using namespace octavo;
using octavo::test::throws;

constexpr int kVocab = 70, kHidden = 64, kHeads = 4, kKvHeads = 2, kHeadDim = 32, kFfn = 96, kLayers = 2, kWindow = 20;

// Random stored bytes whose weights are of useful size.
std::vector<std::uint8_t> random_matrix(std::mt19937& rng, StoredFormat format, std::int64_t n, std::int64_t k) {
  std::vector<std::uint8_t> raw(static_cast<std::size_t>(n * stored_row_bytes(format, k)));
  if (format == StoredFormat::kF32) {
    std::normal_distribution<float> normal(0.0f, 0.15f);
    for (std::size_t i = 0; i < raw.size(); i += 4) {
      const float value = normal(rng);
      std::memcpy(&raw[i], &value, 4);
    }
    return raw;
  }
  for (std::uint8_t& byte : raw) byte = static_cast<std::uint8_t>(rng());
  const std::int64_t block_bytes = stored_row_bytes(format, kQuantBlock);
  const auto set_half = [&](std::size_t at, std::uint16_t half) { std::memcpy(&raw[at], &half, 2); };
  for (std::size_t i = 0; i < raw.size(); i += static_cast<std::size_t>(block_bytes)) {
    set_half(i, format == StoredFormat::kQ8_0 ? 0x1800 : 0x2800);  // 2^-9, 2^-5
    if (format == StoredFormat::kQ4_1) set_half(i + 2, 0xb300);    // -0.22
  }
  return raw;
}

struct Model {
  std::shared_ptr<Weights> weights = std::make_shared<Weights>();
  std::vector<std::pair<std::int32_t, std::vector<std::uint8_t>>> matrices;
  std::vector<std::pair<std::int32_t, std::vector<float>>> vectors;
  bool float32;
  std::mt19937 rng{7};

  explicit Model(bool f32) : float32(f32) {}

  std::int32_t matrix(StoredFormat format, std::int64_t n, std::int64_t k) {
    const std::int32_t index = weights->declare_matrix(format, float32, n, k);
    matrices.emplace_back(index, random_matrix(rng, format, n, k));
    return index;
  }
  std::int32_t vector(std::int64_t n, float mean) {
    std::normal_distribution<float> normal(mean, 0.1f);
    const std::int32_t index = weights->declare_vector(n);
    std::vector<float> values(static_cast<std::size_t>(n));
    for (float& value : values) value = normal(rng);
    vectors.emplace_back(index, values);
    return index;
  }
  void fill() {
    Pool pool(2);
    weights->allocate();
    for (const auto& [index, raw] : matrices) weights->fill_matrix(pool, index, raw);
    for (const auto& [index, values] : vectors) weights->fill_vector(index, values);
  }
};

// Layers of different formats; the second sees a window. Declares its weights, in the same order for the same
// `float32`.
struct Recorded {
  Model model;
  std::vector<std::unique_ptr<Program>> programs;  // one per instruction set

  explicit Recorded(bool float32, bool fuse = true) : model(float32) {
    struct Layer {
      std::int32_t attn_norm, q, k, v, o, q_bias, mlp_norm, gate, up, down;
    };
    const std::int32_t embed = model.matrix(StoredFormat::kQ8_0, kVocab, kHidden);
    std::vector<Layer> layers;
    for (const StoredFormat format : {StoredFormat::kQ4_1, StoredFormat::kF32}) {
      const StoredFormat other = format == StoredFormat::kF32 ? StoredFormat::kF32 : StoredFormat::kQ4_0;
      layers.push_back({model.vector(kHidden, 1.0f), model.matrix(format, kHeads * kHeadDim, kHidden),
                        model.matrix(other, kKvHeads * kHeadDim, kHidden),
                        model.matrix(StoredFormat::kQ8_0, kKvHeads * kHeadDim, kHidden),
                        model.matrix(format, kHidden, kHeads * kHeadDim), model.vector(kHeads * kHeadDim, 0.0f),
                        model.vector(kHidden, 1.0f), model.matrix(format, kFfn, kHidden),
                        model.matrix(other, kFfn, kHidden), model.matrix(format, kHidden, kFfn)});
    }
    const std::int32_t norm = model.vector(kHidden, 1.0f);
    for (const std::string& isa : available_isas()) {
      programs.push_back(std::make_unique<Program>(kernels_for(isa), model.weights));
      Program& p = *programs.back();
      Program::ValueId x = p.embed(embed), angles = -1;
      for (int i = 0; i < kLayers; ++i) {
        const Layer& layer = layers[i];
        const Program::ValueId normed = p.norm(x, layer.attn_norm, 1e-5f);
        Program::ValueId q = p.linear(normed, layer.q, layer.q_bias), k = p.linear(normed, layer.k, -1);
        const Program::ValueId v = p.linear(normed, layer.v, -1);
        if (i == 0) angles = p.angles({1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003}, 1.0);
        q = p.rope(q, angles, kHeadDim, i == 0);
        k = p.rope(k, angles, kHeadDim, i == 0);
        p.kv_write(i, kKvHeads, k, v);
        const Program::ValueId mixed = p.attention(i, kHeads, kKvHeads, 0.2f, i == 1 ? kWindow : 0, q);
        x = p.add(x, p.linear(mixed, layer.o, -1));
        const Program::ValueId inner = p.norm(x, layer.mlp_norm, 1e-5f);
        const Program::ValueId gate = p.linear(inner, layer.gate, -1), up = p.linear(inner, layer.up, -1);
        x = p.add(x, p.linear(p.silu_mul(gate, up), layer.down, -1));
      }
      p.finish(p.linear(p.norm(p.select(x), norm, 1e-5f), embed, -1), fuse);
    }
    model.fill();
  }
};

std::shared_ptr<KvStore> make_cache(bool float32, int block_size, int tokens) {
  const int blocks = tokens / block_size;
  return std::make_shared<KvStore>(
      float32 ? KvFormat::kF32 : KvFormat::kBF16, block_size,
      std::vector<KvGroup>{{{0}, blocks, kKvHeads, kHeadDim, 0}, {{1}, blocks, kKvHeads, kHeadDim, kWindow}});
}

struct Sequence {
  std::vector<std::int32_t> tokens;
  std::int32_t first_block;  // its blocks are first_block, first_block + 1, ... in both groups
};

// One step: tokens [start, start + count) of each named sequence. Returns the logits of every token.
struct Chunk {
  const Sequence* sequence;
  int start, count;
};

std::vector<float> step(Program& program, Pool& pool, int block_size, const std::vector<Chunk>& chunks) {
  std::vector<std::int32_t> tokens, positions, starts{0}, wanted;
  std::int64_t columns = 0;
  for (const Chunk& chunk : chunks) {
    for (int i = chunk.start; i < chunk.start + chunk.count; ++i) {
      tokens.push_back(chunk.sequence->tokens[i]);
      positions.push_back(i);
    }
    starts.push_back(static_cast<std::int32_t>(tokens.size()));
    columns = std::max<std::int64_t>(columns, (chunk.start + chunk.count + block_size - 1) / block_size);
  }
  wanted.resize(tokens.size());
  std::iota(wanted.begin(), wanted.end(), 0);
  std::vector<std::int32_t> full, windowed;
  for (const Chunk& chunk : chunks)
    for (std::int64_t b = 0; b < columns; ++b) {
      const bool used = b * block_size < chunk.start + chunk.count;
      const std::int32_t block = used ? chunk.sequence->first_block + static_cast<std::int32_t>(b) : -1;
      full.push_back(block);
      windowed.push_back((b + 1) * block_size <= chunk.start - kWindow + 1 ? -1 : block);
    }
  const Logits logits =
      program.run(pool, {tokens, positions, starts, wanted, {{full.data(), columns}, {windowed.data(), columns}}});
  CHECK(logits.columns == kVocab && logits.rows == static_cast<std::int64_t>(tokens.size()));
  return {logits.data(), logits.data() + logits.rows * logits.columns};
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void bits_depend_on_the_row_alone(bool float32) {
  Recorded recorded(float32);
  std::mt19937 rng(3);
  Sequence main{{}, 0}, other{{}, 40}, third{{}, 80};
  for (Sequence* sequence : {&main, &other, &third})
    for (int i = 0; i < 300; ++i) sequence->tokens.push_back(static_cast<std::int32_t>(rng() % kVocab));

  std::vector<float> expected;
  for (const auto& program : recorded.programs) {
    for (const int threads : {1, 3}) {
      Pool pool(threads);
      for (const int block_size : {8, 16, 32}) {
        const std::string where = std::string(program->isa()) + ", threads " + std::to_string(threads) + ", block " +
                                  std::to_string(block_size);
        program->bind(make_cache(float32, block_size, 3200));
        const std::vector<float> all = step(*program, pool, block_size, {{&main, 0, 300}});
        if (expected.empty()) {
          expected = all;
          for (const float value : all) CHECK_MSG(std::isfinite(value), where);
          const auto [least, most] = std::minmax_element(all.begin(), all.end());
          CHECK(*most - *least > 1.0f);
        }
        CHECK_MSG(same_bits(all, expected), where);
        // Chunks of several sizes beside other rows, on a fresh cache; the last tokens one by one.
        program->bind(make_cache(float32, block_size, 3200));
        std::vector<float> chunked;
        for (int start = 0, turn = 0; start < 300; ++turn) {
          const int count = start >= 290 ? 1 : std::min(290 - start, 1 + 37 * (turn % 3));
          std::vector<Chunk> chunks{{&main, start, count}};
          if (turn % 2 == 1) chunks.insert(chunks.begin(), {&other, 0, 5 + turn});
          if (turn % 3 == 1) chunks.push_back({&third, 0, 64});
          const std::vector<float> logits = step(*program, pool, block_size, chunks);
          const std::ptrdiff_t skip = turn % 2 == 1 ? (5 + turn) * kVocab : 0;
          chunked.insert(chunked.end(), logits.begin() + skip, logits.begin() + skip + count * kVocab);
          start += count;
        }
        CHECK_MSG(same_bits(chunked, expected), where + ", chunked");
      }
    }
  }
}

void logits_outlive_a_larger_step() {
  Recorded recorded(false);
  Program& program = *recorded.programs.back();
  Pool pool(1);
  program.bind(make_cache(false, 16, 48 * 200));
  const std::vector<std::int32_t> token{1}, position{0}, starts{0, 1}, wanted{0}, table{0};
  const Batch one{token, position, starts, wanted, {{table.data(), 1}, {table.data(), 1}}};
  const Logits first = program.run(pool, one);
  const float before = first.data()[0];
  constexpr int kTokens = 8000;  // their logits do not fit the first buffer
  std::vector<std::int32_t> many(kTokens, 1), index(kTokens);
  std::iota(index.begin(), index.end(), 0);
  std::vector<std::int32_t> positions(kTokens), rows(kTokens / 40 + 1);
  for (int i = 0; i < kTokens; ++i) positions[i] = i % 40;
  for (std::size_t r = 0; r < rows.size(); ++r) rows[r] = static_cast<std::int32_t>(40 * r);
  std::vector<std::int32_t> tables;
  for (std::size_t r = 0; r + 1 < rows.size(); ++r)
    for (int b = 0; b < 3; ++b) tables.push_back(static_cast<std::int32_t>(3 * r) + b);
  const Logits second = program.run(pool, {many, positions, rows, index, {{tables.data(), 3}, {tables.data(), 3}}});
  CHECK(second.rows == kTokens && second.memory != first.memory && first.data()[0] == before);
  CHECK(second.data()[0] == before);
  CHECK(program.run(pool, {token, position, starts, {}, {{table.data(), 1}, {table.data(), 1}}}).rows == 0);
}

void wrong_recordings_are_refused() {
  auto weights = std::make_shared<Weights>();
  const std::int32_t matrix = weights->declare_matrix(StoredFormat::kF32, false, 64, 32);
  const std::int32_t vector = weights->declare_vector(32);
  Program program(default_kernels(), weights);
  const auto refused = [](const auto& body) { return throws<std::invalid_argument>(body); };
  const Program::ValueId x = program.embed(matrix);
  CHECK(refused([&] { program.embed(matrix + 1); }));
  CHECK(refused([&] { program.norm(x, vector + 1, 1e-5f); }));
  CHECK(refused([&] { program.norm(x + 1, vector, 1e-5f); }));
  CHECK(refused([&] { program.norm(-1, vector, 1e-5f); }));
  CHECK(refused([&] { program.linear(x, matrix, vector); }));
  const Program::ValueId wide = program.linear(x, matrix, -1);
  CHECK(refused([&] { program.linear(wide, matrix, -1); }));
  CHECK(refused([&] { program.norm(wide, vector, 1e-5f); }));
  CHECK(refused([&] { program.add(x, wide); }));
  CHECK(refused([&] { program.silu_mul(x, wide); }));
  CHECK(refused([&] { program.rope(x, program.angles({1.0}, 1.0), 24, false); }));
  CHECK(refused([&] { program.angles({}, 1.0); }));
  CHECK(refused([&] { program.attention(0, 3, 1, 1.0f, 0, x); }));
  CHECK(refused([&] { program.attention(0, 2, 1, 1.0f, 0, x); }));  // heads of 16
  CHECK(refused([&] { program.kv_write(0, 4, wide, wide); }));
  CHECK(refused([&] { program.finish(wide); }));
  const Program::ValueId selected = program.select(x);
  CHECK(refused([&] { program.select(selected); }));
  const Program::ValueId logits = program.linear(selected, matrix, -1);
  program.finish(logits);
  CHECK(refused([&] { program.embed(matrix); }));
  CHECK(refused([&] { program.finish(logits); }));
  Pool pool(1);
  CHECK(refused([&] { program.run(pool, {}); }));
  CHECK(refused([&] { weights->fill_vector(vector, std::vector<float>(32)); }));
  weights->allocate();
  CHECK(refused([&] { weights->allocate(); }));
  CHECK(refused([&] { weights->declare_vector(1); }));
  CHECK(refused([&] { weights->fill_vector(vector, std::vector<float>(31)); }));
  CHECK(refused([&] { weights->fill_matrix(pool, matrix, std::vector<std::uint8_t>(64 * 32)); }));
  const auto store = [](int block_size, KvGroup group) {
    KvStore cache(KvFormat::kBF16, block_size, {std::move(group)});
  };
  CHECK(refused([&] { store(12, {{0}, 1, 1, 32, 0}); }));
  CHECK(refused([&] { store(16, {{0}, 0, 1, 32, 0}); }));
  CHECK(refused([&] { store(16, {{0}, 1, 0, 32, 0}); }));
  CHECK(refused([&] { store(16, {{0}, 1, 1, 24, 0}); }));
  CHECK(refused([&] { store(16, {{0, 0}, 1, 1, 32, 0}); }));
  CHECK(refused([&] { store(16, {{-1}, 1, 1, 32, 0}); }));
}

void wrong_batches_are_refused() {
  Recorded recorded(false);
  Program& program = *recorded.programs.front();
  Pool pool(1);
  const auto refused = [&](std::vector<std::int32_t> tokens, std::vector<std::int32_t> positions,
                           std::vector<std::int32_t> starts, std::vector<std::int32_t> wanted,
                           std::vector<std::int32_t> table, int tables = 2) {
    const auto columns =
        static_cast<std::int64_t>(table.size() / (starts.empty() ? 1 : std::max<std::size_t>(1, starts.size() - 1)));
    const Batch batch{tokens, positions, starts, wanted, std::vector<Batch::Table>(tables, {table.data(), columns})};
    return throws<std::invalid_argument>([&] { program.run(pool, batch); });
  };
  CHECK(refused({1}, {0}, {0, 1}, {0}, {0}));  // no cache
  CHECK(throws<std::invalid_argument>([&] {
    program.bind(std::make_shared<KvStore>(KvFormat::kBF16, 16, std::vector<KvGroup>{{{0}, 4, kKvHeads, kHeadDim, 0}}));
  }));
  CHECK(throws<std::invalid_argument>([&] {
    program.bind(std::make_shared<KvStore>(KvFormat::kBF16, 16, std::vector<KvGroup>{{{0, 1}, 4, 1, kHeadDim, 0}}));
  }));
  CHECK(throws<std::invalid_argument>([&] {
    program.bind(
        std::make_shared<KvStore>(KvFormat::kBF16, 16, std::vector<KvGroup>{{{0, 1}, 4, kKvHeads, kHeadDim, kWindow}}));
  }));
  program.bind(make_cache(false, 16, 64));
  CHECK(!refused({1, 2, 3}, {0, 1, 15}, {0, 2, 3}, {0, 2}, {0, 1}));
  CHECK(refused({}, {}, {0}, {}, {0}));
  CHECK(refused({1}, {0, 1}, {0, 1}, {0}, {0}));
  CHECK(refused({1}, {0}, {0}, {0}, {0}));
  CHECK(refused({1}, {0}, {0, 2}, {0}, {0}));
  CHECK(refused({1}, {0}, {1, 1}, {0}, {0}));
  CHECK(refused({1, 2}, {0, 1}, {0, 0, 2}, {0}, {0, 1}));
  CHECK(refused({1, 2}, {0, 1}, {0, 9, 2}, {0}, {0, 1}));  // a row beyond the tokens must not even be read
  CHECK(refused({kVocab}, {0}, {0, 1}, {0}, {0}));
  CHECK(refused({-1}, {0}, {0, 1}, {0}, {0}));
  CHECK(refused({1}, {-1}, {0, 1}, {0}, {0}));
  CHECK(refused({1}, {INT32_MAX}, {0, 1}, {0}, {0}));
  CHECK(refused({1, 2}, {0, 2}, {0, 2}, {0}, {0}));
  CHECK(refused({1, 2}, {0, 1}, {0, 2}, {1, 0}, {0}));
  CHECK(refused({1, 2}, {0, 1}, {0, 2}, {2}, {0}));
  CHECK(refused({1}, {16}, {0, 1}, {0}, {0}));      // table too short
  CHECK(refused({1}, {16}, {0, 1}, {0}, {-1, 0}));  // freed block that is still read
  CHECK(refused({1}, {0}, {0, 1}, {0}, {4}));       // beyond the pool
  CHECK(refused({1}, {0}, {0, 1}, {0}, {0}, 1));
}

// Decoding in one call gives what single steps give, and ends after a step in which a row meets an end id.
void decoding_is_steps_in_a_row() {
  Recorded recorded(false);
  Pool pool(2);
  const std::vector<std::int32_t> slots{1, 0}, starts{0, 1, 2}, wanted{0, 1}, table{0, 1, 2, 3};
  for (const auto& program : recorded.programs) {
    const auto sampler = [&](std::vector<std::int32_t> end_ids) {
      auto made = std::make_unique<Sampler>(kernels_for(program->isa()), 2, kVocab, &pool);
      for (const std::int32_t slot : slots) {
        Sampling sampling;
        sampling.temperature = 1.5;
        sampling.seed = 5;
        sampling.choice = static_cast<std::uint32_t>(slot);
        sampling.end_ids = end_ids;
        made->start(slot, sampling, std::vector<std::int32_t>{3}, 1);
      }
      return made;
    };
    const auto batch = [&](const std::vector<std::int32_t>& tokens, const std::vector<std::int32_t>& positions) {
      return Batch{tokens, positions, starts, wanted, {{table.data(), 2}, {table.data(), 2}}};
    };
    constexpr int kSteps = 12;
    program->bind(make_cache(false, 16, 64));
    const auto step_by_step = sampler({});
    std::vector<std::int32_t> tokens{3, 9}, positions{0, 0}, expected;
    for (int i = 0; i < kSteps; ++i) {
      const Logits logits = program->run(pool, batch(tokens, positions));
      tokens = step_by_step->sample(logits.data(), slots, std::vector<std::int64_t>(2, i + 1)).tokens;
      positions = {i + 1, i + 1};
      expected.insert(expected.end(), tokens.begin(), tokens.end());
    }
    const std::vector<std::int32_t> first{3, 9}, zero{0, 0};
    program->bind(make_cache(false, 16, 64));
    const Decoded all = decode(*program, pool, *sampler({}), batch(first, zero), slots, kSteps);
    CHECK(all.num_steps == kSteps && all.tokens == expected);
    CHECK(all.work.seconds > 0 && all.work.weight_bytes > program->work().weight_bytes);
    program->bind(make_cache(false, 16, 64));
    const Decoded ended = decode(*program, pool, *sampler({expected[7]}), batch(first, zero), slots, kSteps);
    const auto met = std::find(expected.begin(), expected.end(), expected[7]) - expected.begin();
    CHECK(ended.num_steps == met / 2 + 1);
    CHECK(std::equal(ended.tokens.begin(), ended.tokens.end(), expected.begin()));
    const auto refused = [&](const Batch& wrong, std::span<const std::int32_t> of, std::int64_t steps) {
      return throws<std::invalid_argument>([&] { decode(*program, pool, *sampler({}), wrong, of, steps); });
    };
    CHECK(refused(batch(first, zero), slots, 0));
    CHECK(refused(batch(first, zero), std::vector<std::int32_t>{1}, 2));
    CHECK(refused(batch(first, zero), std::vector<std::int32_t>{1, 1}, 2));
    CHECK(refused(batch(first, {0, 31}), slots, 3));  // the table ends
  }
}

}  // namespace

int main() {
  bits_depend_on_the_row_alone(false);
  bits_depend_on_the_row_alone(true);
  logits_outlive_a_larger_step();
  wrong_recordings_are_refused();
  wrong_batches_are_refused();
  decoding_is_steps_in_a_row();
  return octavo::test::failures();
}
