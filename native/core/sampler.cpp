#include "core/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/fpu.h"
#include "core/philox.h"

namespace octavo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kGreedyBelow = 1e-5;        // temperatures under it are greedy
constexpr double kSmallestScale = 1e-30;     // temperatures above 1e30 act as 1e30: -inf * scale must stay -inf
constexpr std::int32_t kMaxVocab = 1 << 22;  // masses of 2^40 each still sum within 63 bits
constexpr double kMassUnits = 0x1p40;
constexpr std::size_t kMassBuckets = 2048;
constexpr float kDeepestZ = 90.0f;        // e^-90 is zero
constexpr float kSmallestDepth = 1e-20f;  // a range of z that is not worth dividing
constexpr std::int64_t kGroupsPerChunk = 16;

std::int64_t num_chunks(std::int64_t n) { return (n + kSampleChunk - 1) / kSampleChunk; }

// What is not a number any more after treatment (an infinite bias on an opposite infinity) cannot be chosen.
float or_masked(float value) { return std::isnan(value) ? -kInfinity : value; }

// The order of likelihood: descending logit, ties by ascending id.
template <typename T>
bool more_likely(const T& a, const T& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

std::int64_t mass_of(float weight) { return static_cast<std::int64_t>(static_cast<double>(weight) * kMassUnits); }

// The limit of a distribution as some logits go to +inf: those share all probability.
void collapse_infinities(float* row, std::int32_t n) {
  for (std::int32_t i = 0; i < n; ++i) row[i] = row[i] == kInfinity ? 0.0f : -kInfinity;
}

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

}  // namespace

bool Sampler::Slot::greedy() const { return sampling.temperature < kGreedyBelow; }

bool Sampler::Slot::counts_tokens() const {
  return sampling.repetition_penalty != 1.0f || sampling.presence_penalty != 0.0f || sampling.frequency_penalty != 0.0f;
}

bool Sampler::Slot::treats_logits() const {
  return sampling.allowed_ids.has_value() || !sampling.logit_bias.empty() || !sampling.bad_words.empty() ||
         num_generated < sampling.min_tokens || !seen.empty();
}

template <typename Predicate>
void Sampler::Scratch::keep_if(const Predicate& predicate) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < num_kept; ++i) {
    if (!predicate(i)) continue;
    ids[kept] = ids[i];
    logits[kept] = logits[i];
    weights[kept++] = weights[i];
  }
  num_kept = kept;
}

void Sampler::Slot::see(std::int32_t token, bool generated) {
  const auto [place, is_new] = seen_index.try_emplace(token, seen.size());
  if (is_new) seen.push_back({token, 0});
  if (generated) ++seen[place->second].num_generated;
}

void Sampler::Slot::append(std::int32_t token) {
  ++num_generated;
  if (counts_tokens()) see(token, true);
  if (tail_capacity == 0) return;
  if (tail.size() == tail_capacity) tail.erase(tail.begin());
  tail.push_back(token);
}

Sampler::Sampler(const Kernels& kernels, std::int32_t max_slots, std::int32_t vocab, Pool* pool)
    : kernels_(kernels), vocab_(vocab), pool_(pool) {
  if (max_slots < 1) fail("the sampler needs at least one slot, not " + std::to_string(max_slots));
  if (vocab < 1 || vocab > kMaxVocab)
    fail("vocabulary of " + std::to_string(vocab) + " tokens; expected 1.." + std::to_string(kMaxVocab));
  slots_.resize(static_cast<std::size_t>(max_slots));
}

void Sampler::start(std::int32_t slot, Sampling sampling, std::span<const std::int32_t> tokens,
                    std::int64_t num_prompt_tokens) {
  if (slot < 0 || static_cast<std::size_t>(slot) >= slots_.size())
    fail("slot " + std::to_string(slot) + " is outside 0.." + std::to_string(slots_.size() - 1));
  if (num_prompt_tokens < 0 || num_prompt_tokens > static_cast<std::int64_t>(tokens.size()))
    fail("a prompt of " + std::to_string(num_prompt_tokens) + " tokens among " + std::to_string(tokens.size()) +
         " known ones");
  const auto check = [this](std::int32_t id, const char* what) {
    if (id < 0 || id >= vocab_)
      fail(std::string(what) + ": token id " + std::to_string(id) + " is outside the vocabulary 0.." +
           std::to_string(vocab_ - 1));
  };
  for (const std::int32_t id : tokens) check(id, "known tokens");
  for (const auto& [id, bias] : sampling.logit_bias) check(id, "logit_bias");
  if (sampling.allowed_ids)
    for (const std::int32_t id : *sampling.allowed_ids) check(id, "allowed_token_ids");
  for (const auto& word : sampling.bad_words) {
    if (word.empty()) fail("bad_words: an empty word");
    for (const std::int32_t id : word) check(id, "bad_words");
  }
  // An end id that the model cannot produce needs no mask.
  std::erase_if(sampling.end_ids, [this](std::int32_t id) { return id < 0 || id >= vocab_; });

  Slot fresh;
  fresh.active = true;
  fresh.sampling = std::move(sampling);
  const Sampling& s = fresh.sampling;
  fresh.scale = static_cast<float>(std::max(1.0 / std::max(s.temperature, kGreedyBelow), kSmallestScale));
  fresh.min_z = s.min_p > 0.0 ? std::min(static_cast<float>(std::log(s.min_p)), 0.0f) : -kInfinity;
  fresh.num_generated = static_cast<std::int64_t>(tokens.size()) - num_prompt_tokens;
  for (const auto& word : s.bad_words) fresh.tail_capacity = std::max(fresh.tail_capacity, word.size() - 1);
  const std::size_t tail = std::min(fresh.tail_capacity, tokens.size());
  fresh.tail.assign(tokens.end() - static_cast<std::ptrdiff_t>(tail), tokens.end());
  if (fresh.counts_tokens()) {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const bool generated = static_cast<std::int64_t>(i) >= num_prompt_tokens;
      if (generated || s.repetition_penalty != 1.0f) fresh.see(tokens[i], generated);
    }
  }
  slots_[static_cast<std::size_t>(slot)] = std::move(fresh);
}

void Sampler::extend(std::int32_t slot, std::span<const std::int32_t> tokens) {
  checked(slot);
  for (const std::int32_t id : tokens)
    if (id < 0 || id >= vocab_)
      fail("forced tokens: token id " + std::to_string(id) + " is outside the vocabulary 0.." +
           std::to_string(vocab_ - 1));
  for (const std::int32_t id : tokens) slots_[static_cast<std::size_t>(slot)].append(id);
}

void Sampler::stop(std::int32_t slot) {
  checked(slot);
  slots_[static_cast<std::size_t>(slot)] = Slot{};
}

bool Sampler::ends(std::int32_t slot, std::int32_t token) const {
  const std::vector<std::int32_t>& end_ids = checked(slot).sampling.end_ids;
  return std::find(end_ids.begin(), end_ids.end(), token) != end_ids.end();
}

const Sampler::Slot& Sampler::checked(std::int32_t slot) const {
  if (slot < 0 || static_cast<std::size_t>(slot) >= slots_.size() || !slots_[static_cast<std::size_t>(slot)].active)
    fail("slot " + std::to_string(slot) + " has not been started");
  return slots_[static_cast<std::size_t>(slot)];
}

std::int32_t Sampler::top_count(std::int32_t num_top) const { return num_top < 0 ? vocab_ : std::min(num_top, vocab_); }

std::unique_ptr<Sampler::Scratch> Sampler::borrow_scratch() {
  {
    const std::lock_guard lock(scratch_mutex_);
    if (!free_scratch_.empty()) {
      auto scratch = std::move(free_scratch_.back());
      free_scratch_.pop_back();
      return scratch;
    }
  }
  const auto n = static_cast<std::size_t>(vocab_);
  auto scratch = std::make_unique<Scratch>();
  scratch->probabilities.resize(n);
  scratch->ids.resize(n);
  scratch->group_max.resize(static_cast<std::size_t>(num_chunks(vocab_) * kGroupsPerChunk));
  scratch->chunk_sums.resize(static_cast<std::size_t>(num_chunks(vocab_)));
  return scratch;
}

void Sampler::give_back(std::unique_ptr<Scratch> scratch) {
  const std::lock_guard lock(scratch_mutex_);
  free_scratch_.push_back(std::move(scratch));
}

template <typename Body>
void Sampler::for_each_row(std::int64_t rows, const Body& body) {
  const auto run = [&](std::int32_t row) {
    const KernelFpu fpu;
    auto scratch = borrow_scratch();
    body(static_cast<std::size_t>(row), *scratch);
    give_back(std::move(scratch));
  };
  if (pool_ != nullptr)
    pool_->parallel_for(static_cast<std::int32_t>(rows), run);
  else
    for (std::int32_t row = 0; row < static_cast<std::int32_t>(rows); ++row) run(row);
}

void Sampler::check_masks(const RowMasks& masks, std::size_t rows) const {
  if (masks.rows.empty()) return;
  if (masks.rows.size() != rows)
    fail("masks for " + std::to_string(masks.rows.size()) + " rows; expected " + std::to_string(rows));
  const std::int64_t count = masks.num_words > 0 ? static_cast<std::int64_t>(masks.words.size()) / masks.num_words : 0;
  for (const std::int32_t row : masks.rows)
    if (row < -1 || row >= count) fail("mask " + std::to_string(row) + " is outside -1.." + std::to_string(count - 1));
}

SampledRows Sampler::sample(float* logits, std::span<const std::int32_t> slots, std::span<const std::int64_t> positions,
                            const RowMasks& masks) {
  const std::size_t rows = slots.size();
  check_masks(masks, rows);
  if (positions.size() != rows)
    fail(std::to_string(positions.size()) + " positions for " + std::to_string(rows) + " rows");
  ++calls_;
  SampledRows out;
  RowLogprobs& logprobs = out.logprobs;
  logprobs.offsets.assign(1, 0);
  for (const std::int32_t slot : slots) {
    const Slot& bound = checked(slot);
    if (bound.last_call == calls_) fail("slot " + std::to_string(slot) + " appears twice in one step");
    slots_[static_cast<std::size_t>(slot)].last_call = calls_;
    const auto& wanted = bound.sampling.logprobs;
    logprobs.offsets.push_back(logprobs.offsets.back() + (wanted ? 1 + top_count(*wanted) : 0));
  }
  out.tokens.assign(rows, -1);
  out.status.assign(rows, RowStatus::kOk);
  logprobs.ranks.assign(rows, 0);
  logprobs.ids.assign(static_cast<std::size_t>(logprobs.offsets.back()), 0);
  logprobs.values.assign(static_cast<std::size_t>(logprobs.offsets.back()), 0.0f);

  for_each_row(static_cast<std::int64_t>(rows), [&](std::size_t row, Scratch& scratch) {
    Slot& slot = slots_[static_cast<std::size_t>(slots[row])];
    const std::int64_t first = logprobs.offsets[row];
    const LogprobOutput output{logprobs.ids.data() + first, logprobs.values.data() + first, &logprobs.ranks[row],
                               static_cast<std::int32_t>(logprobs.offsets[row + 1] - first - 1)};
    const std::uint32_t* mask = nullptr;
    if (!masks.rows.empty() && masks.rows[row] >= 0)
      mask = masks.words.data() + static_cast<std::ptrdiff_t>(masks.rows[row]) * masks.num_words;
    out.status[row] = sample_row(logits + static_cast<std::ptrdiff_t>(row) * vocab_, slot, positions[row], mask,
                                 masks.num_words, &out.tokens[row], output, scratch);
    if (out.status[row] == RowStatus::kOk) slot.append(out.tokens[row]);
  });
  return out;
}

RowLogprobs Sampler::score(const float* logits, std::span<const std::int32_t> targets, std::int32_t num_top,
                           std::vector<RowStatus>& status) {
  const std::size_t rows = targets.size();
  for (const std::int32_t target : targets)
    if (target < 0 || target >= vocab_)
      fail("target " + std::to_string(target) + " is outside the vocabulary 0.." + std::to_string(vocab_ - 1));
  const std::int32_t top = top_count(num_top);
  RowLogprobs out;
  for (std::size_t row = 0; row <= rows; ++row) out.offsets.push_back(static_cast<std::int64_t>(row) * (1 + top));
  out.ranks.assign(rows, 0);
  out.ids.assign(static_cast<std::size_t>(out.offsets.back()), 0);
  out.values.assign(static_cast<std::size_t>(out.offsets.back()), 0.0f);
  status.assign(rows, RowStatus::kOk);
  for_each_row(static_cast<std::int64_t>(rows), [&](std::size_t row, Scratch& scratch) {
    const std::int64_t first = out.offsets[row];
    const LogprobOutput output{out.ids.data() + first, out.values.data() + first, &out.ranks[row], top};
    status[row] = score_row(logits + static_cast<std::ptrdiff_t>(row) * vocab_, targets[row], output, scratch);
  });
  return out;
}

RowScan Sampler::scan(const float* row, Scratch& scratch) const {
  RowScan found;
  kernels_.scan_row(row, vocab_, scratch.group_max.data(), &found);
  return found;
}

RowStatus Sampler::sample_row(float* logits, const Slot& slot, std::int64_t position, const std::uint32_t* mask,
                              std::int64_t num_words, std::int32_t* token, const LogprobOutput& out,
                              Scratch& scratch) const {
  RowScan found = scan(logits, scratch);
  if (found.has_nan) return RowStatus::kNan;
  if (found.max == -kInfinity) return RowStatus::kNothingLeft;

  // Log-probabilities are of the raw logits, so treatment then works on a copy.
  const bool wants_logprobs = out.num_top >= 0;
  const bool treats = mask != nullptr || slot.treats_logits();
  const bool copies = wants_logprobs && (treats || found.max == kInfinity);
  float* row = logits;
  if (copies) {
    scratch.treated.assign(logits, logits + vocab_);
    row = scratch.treated.data();
  }
  double log_sum_exp = 0.0;
  if (wants_logprobs) {
    if (found.max == kInfinity) {
      collapse_infinities(logits, vocab_);
      found = scan(logits, scratch);
    }
    log_sum_exp = write_top_logprobs(logits, found, out, scratch);
  }

  if (mask != nullptr) apply_mask(row, mask, num_words);
  if (treats) treat(row, slot, scratch);
  if (treats || copies) found = scan(row, scratch);
  if (found.max == -kInfinity) return RowStatus::kNothingLeft;
  if (found.max == kInfinity) {
    collapse_infinities(row, vocab_);
    found = scan(row, scratch);
  }
  *token = choose(row, found, slot, position, scratch);
  if (wants_logprobs) write_logprob(logits, *token, log_sum_exp, out);
  return RowStatus::kOk;
}

RowStatus Sampler::score_row(const float* logits, std::int32_t target, const LogprobOutput& out,
                             Scratch& scratch) const {
  RowScan found = scan(logits, scratch);
  if (found.has_nan) return RowStatus::kNan;
  if (found.max == -kInfinity) return RowStatus::kNothingLeft;
  const float* row = logits;
  if (found.max == kInfinity) {
    scratch.treated.assign(logits, logits + vocab_);
    collapse_infinities(scratch.treated.data(), vocab_);
    row = scratch.treated.data();
    found = scan(row, scratch);
  }
  write_logprob(row, target, write_top_logprobs(row, found, out, scratch), out);
  return RowStatus::kOk;
}

void Sampler::apply_mask(float* row, const std::uint32_t* mask, std::int64_t num_words) const {
  for (std::int64_t begin = 0, word = 0; begin < vocab_; begin += 32, ++word) {
    const std::int64_t end = std::min<std::int64_t>(begin + 32, vocab_);
    const std::uint32_t bits = word < num_words ? mask[word] : 0;
    if (bits == 0xffffffffu) continue;
    if (bits == 0) {
      std::fill(row + begin, row + end, -kInfinity);
      continue;
    }
    for (std::int64_t i = begin; i < end; ++i)
      if ((bits >> (i - begin) & 1u) == 0) row[i] = -kInfinity;
  }
}

void Sampler::treat(float* row, const Slot& slot, Scratch& scratch) const {
  const Sampling& s = slot.sampling;
  if (s.allowed_ids) {
    scratch.values.clear();
    for (const std::int32_t id : *s.allowed_ids) scratch.values.push_back(row[id]);
    std::fill(row, row + vocab_, -kInfinity);
    for (std::size_t i = 0; i < scratch.values.size(); ++i) row[(*s.allowed_ids)[i]] = scratch.values[i];
  }
  for (const auto& [id, bias] : s.logit_bias) row[id] = or_masked(row[id] + bias);
  for (const auto& word : s.bad_words) {
    const std::size_t before = word.size() - 1;
    if (before <= slot.tail.size() &&
        std::equal(word.begin(), word.end() - 1, slot.tail.end() - static_cast<std::ptrdiff_t>(before)))
      row[word.back()] = -kInfinity;
  }
  if (slot.num_generated < s.min_tokens)
    for (const std::int32_t id : s.end_ids) row[id] = -kInfinity;
  for (const SeenToken& token : slot.seen) {
    float value = row[token.id];
    value = value > 0.0f ? value / s.repetition_penalty : value * s.repetition_penalty;
    if (token.num_generated > 0) {
      value = value - s.frequency_penalty * static_cast<float>(token.num_generated);
      value = value - s.presence_penalty;
    }
    row[token.id] = or_masked(value);
  }
}

std::int32_t Sampler::choose(const float* row, const RowScan& found, const Slot& slot, std::int64_t position,
                             Scratch& scratch) const {
  const Sampling& s = slot.sampling;
  if (slot.greedy()) return found.argmax;
  const bool cuts_k = s.top_k > 0 && s.top_k < vocab_;
  const bool cuts_p = s.top_p < 1.0;
  const bool cuts_min = s.min_p > 0.0;
  if ((cuts_k && s.top_k == 1) || s.top_p <= 0.0) return found.argmax;
  const double uniform = sampling_noise(s.seed, static_cast<std::uint32_t>(position), s.choice);
  if (!cuts_k && !cuts_p && !cuts_min) return draw_from_all(row, found, slot.scale, uniform, scratch);

  double total = 0.0;
  if (cuts_k) {
    keep_most_likely(row, s.top_k, scratch);
  } else if (cuts_p) {
    // All tokens below (1 - top_p) * total / n together weigh too little to be needed, also after rounding.
    total = kernels_.exponentials(row, vocab_, found.max, slot.scale, scratch.probabilities.data(), nullptr);
    const double floor = 0.999 * (1.0 - s.top_p) * total / vocab_;
    keep_at_least(scratch.probabilities.data(), static_cast<float>(floor), scratch);
  } else {
    // A bound that is a little low in spite of rounding; what it lets through is decided below.
    const double reach = static_cast<double>(slot.min_z) / static_cast<double>(slot.scale);
    const double max = static_cast<double>(found.max);
    keep_at_least(row, static_cast<float>(max + reach - 1e-5 * (std::abs(max) + std::abs(reach))), scratch);
  }

  const auto gather = [&] {
    scratch.logits.resize(scratch.num_kept);
    scratch.weights.resize(scratch.num_kept);
    for (std::size_t i = 0; i < scratch.num_kept; ++i) scratch.logits[i] = row[scratch.ids[i]];
    kernels_.exponentials(scratch.logits.data(), static_cast<std::int64_t>(scratch.num_kept), found.max, slot.scale,
                          scratch.weights.data(), nullptr);
  };
  gather();
  if (cuts_p) {
    if (cuts_k)
      for (std::size_t i = 0; i < scratch.num_kept; ++i) total += static_cast<double>(scratch.weights[i]);
    const Candidate last = find_last_by_mass(s.top_p * total, found.max, slot.scale, scratch);
    scratch.keep_if([&](std::size_t i) { return !more_likely(last, Candidate{scratch.logits[i], scratch.ids[i], 0}); });
  }
  if (cuts_min)
    scratch.keep_if([&](std::size_t i) { return (scratch.logits[i] - found.max) * slot.scale >= slot.min_z; });

  total = 0.0;
  for (std::size_t i = 0; i < scratch.num_kept; ++i) total += static_cast<double>(scratch.weights[i]);
  const double target = uniform * total;
  double reached = 0.0;
  for (std::size_t i = 0; i < scratch.num_kept; ++i) {
    reached += static_cast<double>(scratch.weights[i]);
    if (reached > target) return scratch.ids[i];
  }
  return found.argmax;  // not reached: `reached` ends at `total`, and uniform < 1
}

std::int32_t Sampler::draw_from_all(const float* row, const RowScan& found, float scale, double uniform,
                                    Scratch& scratch) const {
  const float* p = scratch.probabilities.data();
  const double total =
      kernels_.exponentials(row, vocab_, found.max, scale, scratch.probabilities.data(), scratch.chunk_sums.data());
  const double target = uniform * total;
  double reached = 0.0;
  std::int64_t chunk = 0;
  while (chunk + 1 < num_chunks(vocab_) && reached + scratch.chunk_sums[static_cast<std::size_t>(chunk)] <= target)
    reached += scratch.chunk_sums[static_cast<std::size_t>(chunk++)];
  const std::int64_t begin = chunk * kSampleChunk;
  const std::int64_t end = std::min<std::int64_t>(begin + kSampleChunk, vocab_);
  std::int64_t last = found.argmax;  // the chunk's last possible token: its float32 sum may exceed the float64 one
  for (std::int64_t i = begin; i < end; ++i) {
    if (p[i] == 0.0f) continue;
    last = i;
    reached += static_cast<double>(p[i]);
    if (reached > target) break;
  }
  return static_cast<std::int32_t>(last);
}

// Keeps the tokens whose value is at least `threshold`.
void Sampler::keep_at_least(const float* values, float threshold, Scratch& scratch) const {
  scratch.num_kept = static_cast<std::size_t>(kernels_.collect(values, vocab_, threshold, scratch.ids.data()));
}

// Keeps the `count` most likely tokens. Needs the row's scan in scratch.group_max.
void Sampler::keep_most_likely(const float* row, std::int32_t count, Scratch& scratch) const {
  // As many group maxima as wanted tokens reach the threshold, so at least that many tokens do.
  const std::vector<float>& groups = scratch.group_max;
  if (static_cast<std::size_t>(count) <= groups.size())
    scratch.values.assign(groups.begin(), groups.end());
  else
    scratch.values.assign(row, row + vocab_);
  const auto nth = scratch.values.begin() + (count - 1);
  std::nth_element(scratch.values.begin(), nth, scratch.values.end(), std::greater<>());
  keep_at_least(row, *nth, scratch);
  if (scratch.num_kept == static_cast<std::size_t>(count)) return;

  auto& candidates = scratch.candidates;
  candidates.clear();
  for (std::size_t i = 0; i < scratch.num_kept; ++i) candidates.push_back({row[scratch.ids[i]], scratch.ids[i], 0});
  std::nth_element(candidates.begin(), candidates.begin() + (count - 1), candidates.end(), more_likely<Candidate>);
  const Candidate last = candidates[static_cast<std::size_t>(count - 1)];
  std::size_t kept = 0;
  for (std::size_t i = 0; i < scratch.num_kept; ++i)
    if (!more_likely(last, Candidate{row[scratch.ids[i]], scratch.ids[i], 0})) scratch.ids[kept++] = scratch.ids[i];
  scratch.num_kept = kept;
}

// The last of the shortest list of most likely kept tokens whose weights reach `target`; the least likely one if all do
// not.
Sampler::Candidate Sampler::find_last_by_mass(double target, float max, float scale, Scratch& scratch) const {
  // Weigh the tokens in buckets of z, most likely first, to find the bucket in which the target is reached.
  float deepest = 0.0f;
  for (std::size_t i = 0; i < scratch.num_kept; ++i)
    deepest = std::max(deepest, std::min((max - scratch.logits[i]) * scale, kDeepestZ));
  const float buckets_per_z = deepest > kSmallestDepth ? static_cast<float>(kMassBuckets - 1) / deepest : 0.0f;
  const auto bucket_of = [&](std::size_t i) {
    const float depth = std::min((max - scratch.logits[i]) * scale, deepest);
    return static_cast<std::size_t>(depth * buckets_per_z);
  };
  scratch.masses.assign(kMassBuckets, 0);
  for (std::size_t i = 0; i < scratch.num_kept; ++i) scratch.masses[bucket_of(i)] += mass_of(scratch.weights[i]);
  const double target_mass = target * kMassUnits;
  const auto last_bucket = static_cast<std::size_t>(deepest * buckets_per_z);
  std::int64_t reached = 0;
  std::size_t bucket = 0;
  while (bucket < last_bucket && static_cast<double>(reached + scratch.masses[bucket]) < target_mass)
    reached += scratch.masses[bucket++];

  auto& candidates = scratch.candidates;
  candidates.clear();
  for (std::size_t i = 0; i < scratch.num_kept; ++i)
    if (bucket_of(i) == bucket) candidates.push_back({scratch.logits[i], scratch.ids[i], mass_of(scratch.weights[i])});

  // Bisect it: [begin, end) holds the token sought; all before it are more likely and weigh `reached`.
  auto begin = candidates.begin(), end = candidates.end();
  while (end - begin > 1) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, more_likely<Candidate>);
    std::int64_t upper = 0;
    for (auto it = begin; it != middle; ++it) upper += it->mass;
    if (static_cast<double>(reached + upper) >= target_mass) {
      end = middle;
    } else {
      reached += upper;
      begin = middle;
    }
  }
  return *begin;
}

// Writes the entries after the first and returns log(sum(e^logit)). Needs the row's scan in scratch.group_max.
double Sampler::write_top_logprobs(const float* row, const RowScan& found, const LogprobOutput& out,
                                   Scratch& scratch) const {
  const double sum = kernels_.exponentials(row, vocab_, found.max, 1.0f, nullptr, nullptr);
  const double log_sum_exp = static_cast<double>(found.max) + std::log(sum);
  if (out.num_top == 0) return log_sum_exp;
  if (out.num_top == 1) {
    scratch.ids[0] = found.argmax;
  } else {
    keep_most_likely(row, out.num_top, scratch);
    std::sort(scratch.ids.begin(), scratch.ids.begin() + out.num_top, [&](std::int32_t a, std::int32_t b) {
      return more_likely(Candidate{row[a], a, 0}, Candidate{row[b], b, 0});
    });
  }
  for (std::int32_t i = 0; i < out.num_top; ++i) {
    const std::int32_t id = scratch.ids[static_cast<std::size_t>(i)];
    out.ids[1 + i] = id;
    out.values[1 + i] = static_cast<float>(static_cast<double>(row[id]) - log_sum_exp);
  }
  return log_sum_exp;
}

// Writes the first entry, which is the token's own, and its rank.
void Sampler::write_logprob(const float* row, std::int32_t token, double log_sum_exp, const LogprobOutput& out) const {
  out.ids[0] = token;
  out.values[0] = static_cast<float>(static_cast<double>(row[token]) - log_sum_exp);
  *out.rank = static_cast<std::int32_t>(kernels_.rank(row, vocab_, token));
}

}  // namespace octavo
