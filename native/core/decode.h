// Several steps of decoding in one call: forward, sample, and on from the sampled tokens. For when nothing else is to
// happen between the steps, so that the caller's work between two of them, done with caches that a forward has just
// emptied, is not paid for every token. The bits are those of single steps.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/pool.h"
#include "core/program.h"
#include "core/sampler.h"

namespace octavo {

// Tokens of `num_steps` steps [num_steps, rows]; the status of each row in the last one, before which all were kOk; and
// the work of all.
struct Decoded {
  std::int64_t num_steps = 0;
  std::vector<std::int32_t> tokens;
  std::vector<RowStatus> status;
  Work work;
};

// At most `max_steps` >= 1 steps of a batch in which each row has one token and wants its logits; row r is sampled in
// slots[r], without masks or log-probabilities. Tables hold the blocks of all steps. Ends early after a step in which a
// row failed or sampled one of its end ids. Throws std::invalid_argument as Program::run and Sampler::sample do, and
// for a batch that is none of single tokens.
Decoded decode(Program& program, Pool& pool, Sampler& sampler, const Batch& batch, std::span<const std::int32_t> slots,
               std::int64_t max_steps);

}  // namespace octavo
