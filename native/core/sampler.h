// Turns rows of logits into tokens and log-probabilities. Knows token ids and slots; not requests, text or models.
//
// What each parameter does and the order of treatment are defined by `Sampler` in octavo/backends/base.py, whose
// reference is octavo/backends/numpy/sampler.py. Here is the arithmetic (version 1), the same bits on every instruction
// set:
// - z = (logit - maximum) * float32(1 / temperature) in float32, p = e^z by the kernels' exp in float32: the maximum
// has p = 1.
// - top_k and min_p decide on logits and z alone. top_p adds p as multiples of 2^-40 in integers, so that order does
// not matter.
// - The draw adds p in ascending id in float64; when nothing is cut, whole chunks first, by the kernels' chunk sums.
// - log-sum-exp is maximum + log(sum), in float64 over the kernels' chunk sums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/pool.h"
#include "kernels/kernels.h"

namespace octavo {

// How one sequence is sampled: `TokenSampling` in octavo/contracts.py, as far as it concerns the choice of a token.
struct Sampling {
  double temperature = 1.0;
  std::int32_t top_k = 0;  // 0: all
  double top_p = 1.0;
  double min_p = 0.0;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  float repetition_penalty = 1.0f;
  std::uint64_t seed = 0;
  std::uint32_t choice = 0;
  std::int64_t min_tokens = 0;
  std::vector<std::int32_t> end_ids;  // masked until min_tokens have been generated
  std::vector<std::pair<std::int32_t, float>> logit_bias;
  std::optional<std::vector<std::int32_t>> allowed_ids;
  std::vector<std::vector<std::int32_t>> bad_words;
  std::optional<std::int32_t> logprobs;  // number of alternatives; -1: the whole vocabulary
};

enum class RowStatus : std::uint8_t {
  kOk = 0,
  kNan = 1,          // the logits hold NaN
  kNothingLeft = 2,  // every token has been masked, or had probability zero
};

// Log-probabilities of several rows: row r has entries offsets[r]..offsets[r+1]-1, none if it wants none. The first
// entry is the token itself, then follow the most likely ones, descending, ties by ascending id. ranks[r] is the
// token's rank, from 1.
struct RowLogprobs {
  std::vector<std::int64_t> offsets;
  std::vector<std::int32_t> ids;
  std::vector<float> values;
  std::vector<std::int32_t> ranks;
};

// Results by row. Where status is not kOk, the token is -1 and log-probabilities mean nothing.
struct SampledRows {
  std::vector<std::int32_t> tokens;
  std::vector<RowStatus> status;
  RowLogprobs logprobs;
};

// Which tokens rows may choose: row r of the logits has the `num_words` words from words[rows[r] * num_words] on, or
// with -1 may choose any. Token t is bit t % 32 of word t / 32; tokens beyond the words are not allowed. Borrowed.
struct RowMasks {
  std::span<const std::uint32_t> words;
  std::int64_t num_words = 0;
  std::span<const std::int32_t> rows;  // empty: no row has a mask
};

// Per-slot sampling state. One caller at a time. A row's result depends on its logits, position and slot alone.
class Sampler {
 public:
  // `kernels` and `pool` (null: the calling thread alone) are borrowed and outlive the sampler.
  // Throws std::invalid_argument unless max_slots >= 1 and 1 <= vocab <= 2^22.
  Sampler(const Kernels& kernels, std::int32_t max_slots, std::int32_t vocab, Pool* pool = nullptr);

  // Binds a slot, forgetting what it held. `tokens` are all known tokens, of which the first `num_prompt_tokens` are
  // the prompt. Throws std::invalid_argument for a slot or token id out of range.
  void start(std::int32_t slot, Sampling sampling, std::span<const std::int32_t> tokens,
             std::int64_t num_prompt_tokens);
  // Adds tokens that follow the last known one without having been sampled. Throws std::invalid_argument, before
  // anything changes, for a slot that is free or a token id out of range.
  void extend(std::int32_t slot, std::span<const std::int32_t> tokens);
  void stop(std::int32_t slot);

  // Samples slots.size() rows of `logits` [rows, vocab], which it overwrites, and adds the tokens to the slots' counts.
  // Throws std::invalid_argument, before anything changes, for a slot that is free or appears twice and for masks that
  // do not fit.
  SampledRows sample(float* logits, std::span<const std::int32_t> slots, std::span<const std::int64_t> positions,
                     const RowMasks& masks = {});

  // Log-probability of each row's target and of the `num_top` (-1: all) most likely tokens. Statuses are in `status`.
  // Throws std::invalid_argument for a target out of range.
  RowLogprobs score(const float* logits, std::span<const std::int32_t> targets, std::int32_t num_top,
                    std::vector<RowStatus>& status);

  // Whether a token is one of the slot's end ids. Throws std::invalid_argument for a slot that is free.
  bool ends(std::int32_t slot, std::int32_t token) const;

  std::int32_t vocab() const { return vocab_; }

 private:
  struct SeenToken {
    std::int32_t id;
    std::int32_t num_generated;
  };

  struct Slot {
    bool active = false;
    Sampling sampling;
    float scale = 1.0f;  // float32(1 / temperature)
    float min_z = 0.0f;  // log(min_p)
    std::int64_t num_generated = 0;
    std::vector<std::int32_t> tail;  // the last known tokens, as many as bad words can reach back
    std::size_t tail_capacity = 0;
    std::vector<SeenToken> seen;  // kept only when penalties need it
    std::unordered_map<std::int32_t, std::size_t> seen_index;
    std::uint64_t last_call = 0;

    bool greedy() const;
    bool counts_tokens() const;
    bool treats_logits() const;
    void see(std::int32_t token, bool generated);
    void append(std::int32_t token);
  };

  struct Candidate {
    float logit;
    std::int32_t id;
    std::int64_t mass;  // multiples of 2^-40
  };

  // Working memory of one row.
  struct Scratch {
    std::vector<float> treated;        // [vocab]: the logits after treatment, when the raw ones are still needed
    std::vector<float> probabilities;  // [vocab]
    std::vector<float> group_max;      // of the last scan
    std::vector<double> chunk_sums;
    // The tokens that may be chosen: the first num_kept elements, ascending by id.
    std::size_t num_kept = 0;
    std::vector<std::int32_t> ids;       // [vocab]
    std::vector<float> logits, weights;  // e^z
    std::vector<float> values;           // of selections
    std::vector<Candidate> candidates;
    std::vector<std::int64_t> masses;

    // Keeps the elements whose index satisfies the predicate. It may read element i of each, not earlier ones.
    template <typename Predicate>
    void keep_if(const Predicate& predicate);
  };

  // Where a row's log-probabilities go.
  struct LogprobOutput {
    std::int32_t* ids;
    float* values;
    std::int32_t* rank;
    std::int32_t num_top;
  };

  std::unique_ptr<Scratch> borrow_scratch();
  void give_back(std::unique_ptr<Scratch> scratch);
  template <typename Body>
  void for_each_row(std::int64_t rows, const Body& body);

  RowScan scan(const float* row, Scratch& scratch) const;
  void check_masks(const RowMasks& masks, std::size_t rows) const;
  void apply_mask(float* row, const std::uint32_t* mask, std::int64_t num_words) const;
  void treat(float* row, const Slot& slot, Scratch& scratch) const;
  std::int32_t choose(const float* row, const RowScan& found, const Slot& slot, std::int64_t position,
                      Scratch& scratch) const;
  std::int32_t draw_from_all(const float* row, const RowScan& found, float scale, double uniform,
                             Scratch& scratch) const;
  void keep_at_least(const float* values, float threshold, Scratch& scratch) const;
  void keep_most_likely(const float* row, std::int32_t count, Scratch& scratch) const;
  Candidate find_last_by_mass(double target, float max, float scale, Scratch& scratch) const;
  double write_top_logprobs(const float* row, const RowScan& found, const LogprobOutput& out, Scratch& scratch) const;
  void write_logprob(const float* row, std::int32_t token, double log_sum_exp, const LogprobOutput& out) const;
  RowStatus sample_row(float* logits, const Slot& slot, std::int64_t position, const std::uint32_t* mask,
                       std::int64_t num_words, std::int32_t* token, const LogprobOutput& out, Scratch& scratch) const;
  RowStatus score_row(const float* logits, std::int32_t target, const LogprobOutput& out, Scratch& scratch) const;
  std::int32_t top_count(std::int32_t num_top) const;
  const Slot& checked(std::int32_t slot) const;

  const Kernels& kernels_;
  const std::int32_t vocab_;
  Pool* const pool_;
  std::vector<Slot> slots_;
  std::uint64_t calls_ = 0;
  std::mutex scratch_mutex_;
  std::vector<std::unique_ptr<Scratch>> free_scratch_;
};

}  // namespace octavo
