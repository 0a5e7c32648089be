#include "core/decode.h"

#include <algorithm>
#include <stdexcept>

namespace octavo {

Decoded decode(Program& program, Pool& pool, Sampler& sampler, const Batch& batch, std::span<const std::int32_t> slots,
               std::int64_t max_steps) {
  const std::size_t rows = slots.size();
  if (rows == 0 || max_steps < 1 || batch.tokens.size() != rows || batch.positions.size() != rows ||
      batch.row_starts.size() != rows + 1 || batch.logit_rows.size() != rows)
    throw std::invalid_argument("decoding takes at least one step of at least one row, each of one token");
  std::vector<std::int32_t> tokens(batch.tokens.begin(), batch.tokens.end());
  std::vector<std::int32_t> positions(batch.positions.begin(), batch.positions.end());
  std::vector<std::int64_t> next(rows);
  Batch step = batch;
  step.tokens = tokens;
  step.positions = positions;
  Decoded decoded;
  for (bool on = true; on;) {
    const Logits logits = program.run(pool, step);
    for (std::size_t row = 0; row < rows; ++row) next[row] = std::int64_t{++positions[row]};
    const SampledRows sampled = sampler.sample(logits.data(), slots, next);
    const Work& work = program.work();
    decoded.work.seconds += work.seconds;
    decoded.work.weight_bytes += work.weight_bytes;
    decoded.work.kv_bytes += work.kv_bytes;
    decoded.work.operations += work.operations;
    decoded.tokens.insert(decoded.tokens.end(), sampled.tokens.begin(), sampled.tokens.end());
    decoded.status = sampled.status;
    ++decoded.num_steps;
    on = decoded.num_steps < max_steps;
    for (std::size_t row = 0; row < rows && on; ++row)
      on = sampled.status[row] == RowStatus::kOk && !sampler.ends(slots[row], sampled.tokens[row]);
    tokens = sampled.tokens;
    step.tokens = tokens;
  }
  return decoded;
}

}  // namespace octavo
