#include "core/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "core/dispatch.h"
#include "core/philox.h"

using namespace octavo;
using test::throws;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void philox_gives_the_published_words() {
  using Words = std::array<std::uint32_t, 4>;
  CHECK((philox4x32({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const std::uint32_t ones = 0xffffffff;
  CHECK((philox4x32({ones, ones, ones, ones}, {ones, ones}) == Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK((philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
         Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
  CHECK(sampling_noise(0, 0, 0) == (0x6627e8d5 + 0.5) / 4294967296.0);
}

// Values on a coarse grid, so that there are ties, with some -inf. The vector has no spare capacity: sanitizers see
// overreads.
std::vector<float> random_row(std::mt19937& random, std::size_t n) {
  std::vector<float> row(n);
  for (float& value : row)
    value = random() % 11 == 0 ? -kInf : static_cast<float>(static_cast<int>(random() % 97) - 48) / 8.0f;
  return row;
}

void kernels_do_what_they_say(const Kernels& kernels) {
  std::mt19937 random(1);
  for (const std::size_t n : {1u, 2u, 15u, 16u, 17u, 31u, 33u, 100u, 1023u, 1024u, 1025u, 1040u, 2049u, 5000u}) {
    const std::vector<float> row = random_row(random, n);
    const auto count = static_cast<std::int64_t>(n);
    const std::size_t chunks = (n + kSampleChunk - 1) / kSampleChunk;

    std::vector<float> groups(chunks * 16);
    RowScan found;
    kernels.scan_row(row.data(), count, groups.data(), &found);
    const auto best = std::max_element(row.begin(), row.end());
    CHECK(found.max == *best);
    CHECK(found.argmax == best - row.begin());
    CHECK(!found.has_nan);
    for (std::size_t group = 0; group < groups.size(); ++group) {
      float expected = -kInf;
      for (std::size_t i = group / 16 * kSampleChunk + group % 16; i < n && i < (group / 16 + 1) * kSampleChunk;
           i += 16)
        expected = std::max(expected, row[i]);
      CHECK(groups[group] == expected);
    }

    std::vector<float> powers(n);
    std::vector<double> sums(chunks);
    const float max = found.max == -kInf ? 0.0f : found.max;
    const double sum = kernels.exponentials(row.data(), count, max, 0.5f, powers.data(), sums.data());
    double expected_sum = 0.0, sum_of_sums = 0.0;
    for (std::size_t i = 0; i < n; ++i) {
      const double exact = std::exp(0.5 * (static_cast<double>(row[i]) - static_cast<double>(max)));
      CHECK(std::abs(static_cast<double>(powers[i]) - exact) <= 1e-6 * exact);
      expected_sum += exact;
    }
    for (const double part : sums) sum_of_sums += part;
    CHECK(std::abs(sum - expected_sum) <= 1e-5 * expected_sum);
    CHECK(sum == sum_of_sums);
    CHECK(sum == kernels.exponentials(row.data(), count, max, 0.5f, nullptr, nullptr));

    for (const float threshold : {-kInf, -3.0f, 0.0f, 4.5f, 100.0f}) {
      std::vector<std::int32_t> expected;
      for (std::size_t i = 0; i < n; ++i)
        if (row[i] >= threshold) expected.push_back(static_cast<std::int32_t>(i));
      std::vector<std::int32_t> indices(n);
      indices.resize(static_cast<std::size_t>(kernels.collect(row.data(), count, threshold, indices.data())));
      CHECK(indices == expected);
    }

    for (int round = 0; round < 5; ++round) {
      const std::size_t index = random() % n;
      std::int64_t rank = 1;
      for (std::size_t i = 0; i < n; ++i) rank += row[i] > row[index] || (row[i] == row[index] && i < index);
      CHECK(kernels.rank(row.data(), count, static_cast<std::int64_t>(index)) == rank);
    }

    std::vector<float> spoiled = row;
    spoiled[random() % n] = kNan;
    kernels.scan_row(spoiled.data(), count, groups.data(), &found);
    CHECK(found.has_nan);
    CHECK(found.argmax >= 0 && found.argmax < count);
    std::fill(spoiled.begin(), spoiled.end(), kInf);
    kernels.scan_row(spoiled.data(), count, groups.data(), &found);
    CHECK(!found.has_nan && found.max == kInf && found.argmax == 0);
    std::fill(spoiled.begin(), spoiled.end(), kNan);
    kernels.scan_row(spoiled.data(), count, groups.data(), &found);
    CHECK(found.has_nan && found.max == -kInf && found.argmax == 0);
  }
}

Sampling random_sampling(std::mt19937& random, std::int32_t vocab) {
  const auto pick = [&](auto... choices) {
    const std::vector<double> all{static_cast<double>(choices)...};
    return all[random() % all.size()];
  };
  const auto id = [&] { return static_cast<std::int32_t>(random() % static_cast<unsigned>(vocab)); };
  Sampling s;
  s.temperature = pick(0.0, 5e-324, 1e-5, 0.3, 1.0, 2.5, 1e300);
  s.top_k = static_cast<std::int32_t>(pick(0, 0, 1, 3, 40, 2000, 1 << 30));
  s.top_p = pick(1.0, 1.0, 0.0, 5e-324, 0.3, 0.95, 1.0 - 1e-16);
  s.min_p = pick(0.0, 0.0, 5e-324, 0.1, 1.0);
  s.presence_penalty = static_cast<float>(pick(0.0, 0.5, -2.0));
  s.frequency_penalty = static_cast<float>(pick(0.0, 0.25));
  s.repetition_penalty = static_cast<float>(pick(1.0, 1.3, 1e-6));
  s.seed = random();
  s.choice = random() % 4;
  s.min_tokens = static_cast<std::int64_t>(pick(0, 2, 8));
  s.end_ids = {id(), id(), vocab, -1};
  if (random() % 3 == 0) s.logit_bias = {{id(), 7.5f}, {id(), -kInf}, {id(), kInf}};
  if (random() % 4 == 0) s.allowed_ids = std::vector<std::int32_t>{id(), id(), id(), id()};
  if (random() % 3 == 0) s.bad_words = {{id()}, {id(), id()}, {id(), id(), id()}};
  if (random() % 2 == 0) s.logprobs = static_cast<std::int32_t>(pick(0, 1, 5, -1, 1 << 30));
  return s;
}

struct Run {
  std::vector<SampledRows> steps;
};

// A few steps of random sequences, the same on every call, whatever samples them.
Run run(const Kernels& kernels, Pool* pool, std::int32_t vocab, unsigned seed) {
  std::mt19937 random(seed);
  constexpr std::int32_t kSlots = 9;
  Sampler sampler(kernels, kSlots, vocab, pool);
  std::vector<std::int32_t> slots;
  for (std::int32_t slot = 0; slot < kSlots; ++slot) {
    std::vector<std::int32_t> known(1 + random() % 6);
    for (std::int32_t& token : known) token = static_cast<std::int32_t>(random() % static_cast<unsigned>(vocab));
    sampler.start(slot, random_sampling(random, vocab), known,
                  static_cast<std::int64_t>(random() % (known.size() + 1)));
    slots.push_back(slot);
  }
  Run result;
  for (std::int64_t step = 0; step < 4; ++step) {
    std::vector<float> logits;
    for (std::int32_t row = 0; row < kSlots; ++row) {
      const std::vector<float> values = random_row(random, static_cast<std::size_t>(vocab));
      logits.insert(logits.end(), values.begin(), values.end());
    }
    if (step == 2) logits[static_cast<std::size_t>(vocab) * 4] = kNan;
    if (step == 3) logits[static_cast<std::size_t>(vocab) * 5] = kInf;
    const std::vector<std::int64_t> positions(kSlots, 10 + step);
    result.steps.push_back(sampler.sample(logits.data(), slots, positions));
    const SampledRows& rows = result.steps.back();
    for (std::size_t row = 0; row < slots.size(); ++row) {
      const bool ok = rows.status[row] == RowStatus::kOk;
      CHECK(ok == (rows.tokens[row] >= 0) && rows.tokens[row] < vocab);
      if (step == 2 && row == 4) CHECK(rows.status[row] == RowStatus::kNan);
      if (!ok) continue;
      const auto first = static_cast<std::size_t>(rows.logprobs.offsets[row]);
      const auto end = static_cast<std::size_t>(rows.logprobs.offsets[row + 1]);
      for (std::size_t entry = first; entry < end; ++entry) CHECK(rows.logprobs.values[entry] <= 0.0f);
      if (end > first) CHECK(rows.logprobs.ids[first] == rows.tokens[row]);
    }
  }
  return result;
}

bool same(const Run& a, const Run& b) {
  for (std::size_t step = 0; step < a.steps.size(); ++step) {
    const SampledRows &x = a.steps[step], &y = b.steps[step];
    if (x.tokens != y.tokens || x.status != y.status || x.logprobs.offsets != y.logprobs.offsets) return false;
    if (x.logprobs.ids != y.logprobs.ids || x.logprobs.ranks != y.logprobs.ranks) return false;
    const std::size_t bytes = x.logprobs.values.size() * sizeof(float);
    if (bytes != 0 && std::memcmp(x.logprobs.values.data(), y.logprobs.values.data(), bytes) != 0) return false;
  }
  return true;
}

void builds_and_threads_agree_to_the_bit() {
  Pool pool(3);
  for (const std::int32_t vocab : {1, 5, 16, 47, 1030, 3001}) {
    for (unsigned seed = 0; seed < 8; ++seed) {
      const Run expected = run(kernels_for("portable"), nullptr, vocab, seed);
      for (const std::string& isa : available_isas()) {
        CHECK_MSG(same(run(kernels_for(isa), nullptr, vocab, seed), expected), isa);
        CHECK_MSG(same(run(kernels_for(isa), &pool, vocab, seed), expected), isa);
      }
    }
  }
}

void misuse_is_refused() {
  const Kernels& kernels = kernels_for("portable");
  CHECK(throws<std::invalid_argument>([&] { Sampler none(kernels, 0, 10); }));
  CHECK(throws<std::invalid_argument>([&] { Sampler empty(kernels, 1, 0); }));
  CHECK(throws<std::invalid_argument>([&] { Sampler huge(kernels, 1, (1 << 22) + 1); }));
  Sampler sampler(kernels, 2, 10);
  const std::vector<std::int32_t> known{1, 2}, outside{1, 10};
  CHECK(throws<std::invalid_argument>([&] { sampler.start(2, {}, known, 1); }));
  CHECK(throws<std::invalid_argument>([&] { sampler.start(0, {}, known, 3); }));
  CHECK(throws<std::invalid_argument>([&] { sampler.start(0, {}, outside, 1); }));
  Sampling empty_word;
  empty_word.bad_words = {{}};
  CHECK(throws<std::invalid_argument>([&] { sampler.start(0, empty_word, known, 1); }));
  CHECK(throws<std::invalid_argument>([&] { sampler.stop(0); }));
  Sampling greedy;
  greedy.temperature = 0.0;
  sampler.start(0, greedy, known, 1);
  std::vector<float> logits(20, 0.0f);
  const std::vector<std::int64_t> positions{2, 2};
  const std::vector<std::int32_t> twice{0, 0}, unbound{0, 1}, one{0}, target{10};
  CHECK(throws<std::invalid_argument>([&] { sampler.sample(logits.data(), twice, positions); }));
  CHECK(throws<std::invalid_argument>([&] { sampler.sample(logits.data(), unbound, positions); }));
  CHECK(throws<std::invalid_argument>([&] { sampler.sample(logits.data(), one, positions); }));
  std::vector<RowStatus> status;
  CHECK(throws<std::invalid_argument>([&] { sampler.score(logits.data(), target, 1, status); }));
  CHECK(sampler.sample(logits.data(), one, {positions.data(), 1}).tokens == std::vector<std::int32_t>{0});
}

void scores_are_log_softmax() {
  std::mt19937 random(3);
  for (const std::string& isa : available_isas()) {
    Sampler sampler(kernels_for(isa), 1, 333);
    std::vector<float> logits = random_row(random, 333 * 3);
    logits[333] = kNan;
    const std::vector<std::int32_t> targets{7, 0, 332};
    std::vector<RowStatus> status;
    const RowLogprobs scores = sampler.score(logits.data(), targets, -1, status);
    CHECK(status[0] == RowStatus::kOk && status[1] == RowStatus::kNan && status[2] == RowStatus::kOk);
    double sum = 0.0;
    for (std::size_t entry = 1; entry < 334; ++entry) {
      sum += std::exp(static_cast<double>(scores.values[entry]));
      if (entry > 1) CHECK(scores.values[entry] <= scores.values[entry - 1]);
    }
    CHECK(std::abs(sum - 1.0) < 1e-5);
    CHECK(scores.ids[static_cast<std::size_t>(scores.ranks[0])] == 7);
    CHECK(scores.ids[0] == 7);
  }
}

}  // namespace

int main() {
  philox_gives_the_published_words();
  for (const std::string& isa : available_isas()) kernels_do_what_they_say(kernels_for(isa));
  builds_and_threads_agree_to_the_bit();
  misuse_is_refused();
  scores_are_log_softmax();
  return test::failures();
}
