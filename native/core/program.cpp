#include "core/program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "core/fpu.h"

namespace octavo {
namespace {

// Tiles per thread: enough that a slow thread does not hold up the others, few enough that claiming costs nothing.
constexpr std::int64_t kRowTilesPerThread = 4;
constexpr std::int64_t kMostRowsPerTile = 16;  // so that what one instruction writes is still in cache for the next
constexpr std::int64_t kPanelTilesPerThread = 8;
// Tokens times heads of one KV head that attend together: a multiple of the kernels' tiles.
constexpr std::int32_t kQueryRows = 48;
// With fewer query tiles per thread the splits of the context become tiles too.
constexpr std::int32_t kQueryTilesPerThread = 4;
// A larger buffer of logits is given back when it is no longer needed.
constexpr std::size_t kKeptLogitsBytes = std::size_t{32} << 20;
constexpr std::int64_t kMostColumns = std::int64_t{1} << 30;

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

std::string number(std::int64_t value) { return std::to_string(value); }

void check_head_dim(std::int64_t head_dim) {
  require(head_dim >= kLeastHeadDim && head_dim <= kMostHeadDim && head_dim % kPanel == 0,
          "attention heads of " + number(head_dim) + " dimensions, expected a multiple of " + number(kPanel) + " in " +
              number(kLeastHeadDim) + ".." + number(kMostHeadDim));
}

Program::Form input_form(Packing packing) {
  switch (packing) {
    case Packing::kF32:
      return Program::Form::kFloat;
    case Packing::kBF16:
      return Program::Form::kBf16;
    case Packing::kU4:
    case Packing::kU8:
      return Program::Form::kQuantized;
  }
  throw std::logic_error("unknown packing");
}

}  // namespace

Program::Program(const Kernels& kernels, std::shared_ptr<const Weights> weights)
    : kernels_(kernels), weights_(std::move(weights)) {}

// --- recording
// ------------------------------------------------------------------------------------------------------------------

Program::ValueId Program::new_value(Rows rows, std::int64_t columns, Form form) {
  require(columns >= 1 && columns <= kMostColumns, "a value cannot have " + number(columns) + " columns");
  values_.push_back({rows, form, columns});
  return static_cast<ValueId>(values_.size()) - 1;
}

const Program::Value& Program::value(ValueId id, Form form) const {
  require(id >= 0 && static_cast<std::size_t>(id) < values_.size(), "no value " + number(id));
  require(values_[id].form == form, "value " + number(id) + " does not have the form that this instruction reads");
  return values_[id];
}

const Program::Value& Program::token_value(ValueId id) const {
  const Value& v = value(id);
  require(v.rows == Rows::kTokens, "value " + number(id) + " has one row per logit, expected one per token");
  return v;
}

void Program::emit(const Instruction& instruction) {
  require(logits_ < 0, "the recording has ended");
  instructions_.push_back(instruction);
}

Program::ValueId Program::embed(std::int32_t matrix) {
  const PackedMatrix table = weights_->matrix(matrix);
  const ValueId out = new_value(Rows::kTokens, table.k);
  vocab_ = std::min(vocab_, table.n);
  emit({.op = Op::kEmbed, .out = out, .weight = matrix});
  return out;
}

Program::ValueId Program::norm(ValueId x, std::int32_t weight, float eps) {
  const Value v = value(x);
  const auto size = static_cast<std::int64_t>(weights_->vector(weight).size());
  require(size == v.columns, "a norm over " + number(v.columns) + " columns cannot use " + number(size) + " weights");
  require(eps >= 0, "a norm's epsilon cannot be negative");
  const ValueId out = new_value(v.rows, v.columns);
  emit({.op = Op::kNorm, .out = out, .in = {x, -1}, .weight = weight, .scalar = eps});
  return out;
}

Program::ValueId Program::prepare(ValueId x, Form form) {
  if (form == Form::kFloat) return x;
  for (const Instruction& instruction : instructions_)
    if (instruction.op == Op::kPrepare && instruction.in[0] == x && values_[instruction.out].form == form)
      return instruction.out;
  const ValueId out = new_value(values_[x].rows, values_[x].columns, form);
  emit({.op = Op::kPrepare, .out = out, .in = {x, -1}});
  return out;
}

Program::ValueId Program::linear(ValueId x, std::int32_t matrix, std::int32_t bias) {
  const PackedMatrix m = weights_->matrix(matrix);
  const Value v = value(x);
  require(m.k == v.columns, "a matrix of " + number(m.k) + " columns cannot multiply " + number(v.columns));
  if (bias >= 0) {
    const auto size = static_cast<std::int64_t>(weights_->vector(bias).size());
    require(size == m.n, "a bias of " + number(size) + " does not fit " + number(m.n) + " outputs");
  }
  const ValueId prepared = prepare(x, input_form(m.packing));
  const ValueId out = new_value(v.rows, m.n);
  emit({.op = Op::kLinear, .out = out, .in = {prepared, -1}, .weight = matrix, .bias = bias});
  return out;
}

Program::ValueId Program::angles(std::vector<double> inverse_frequencies, double magnitude) {
  const auto pairs = static_cast<std::int64_t>(inverse_frequencies.size());
  require(pairs >= 1 && pairs <= 4096, "rotary embedding of " + number(pairs) + " pairs, expected 1..4096");
  frequencies_.push_back({std::move(inverse_frequencies), static_cast<float>(magnitude)});
  const ValueId out = new_value(Rows::kTokens, 2 * pairs);
  emit({.op = Op::kAngles, .out = out, .index = static_cast<std::int32_t>(frequencies_.size()) - 1});
  return out;
}

Program::ValueId Program::rope(ValueId x, ValueId angles, std::int32_t head_dim, bool interleaved) {
  const Value v = token_value(x);
  const Value a = token_value(angles);
  require(head_dim >= 1 && v.columns % head_dim == 0,
          number(v.columns) + " columns are not heads of " + number(head_dim));
  require(a.columns <= head_dim, "cannot rotate " + number(a.columns) + " of " + number(head_dim) + " dimensions");
  const ValueId out = new_value(Rows::kTokens, v.columns);
  emit({.op = Op::kRope, .out = out, .in = {x, angles}, .head_dim = head_dim, .interleaved = interleaved});
  return out;
}

void Program::kv_write(std::int32_t layer, std::int32_t num_kv_heads, ValueId k, ValueId v) {
  const Value key = token_value(k);
  require(token_value(v).columns == key.columns, "K and V of layer " + number(layer) + " differ in size");
  require(num_kv_heads >= 1 && key.columns % num_kv_heads == 0,
          number(key.columns) + " columns are not " + number(num_kv_heads) + " KV heads");
  require(layer >= 0, "layer cannot be negative");
  check_head_dim(key.columns / num_kv_heads);
  emit({.op = Op::kKvWrite,
        .in = {k, v},
        .index = layer,
        .num_kv_heads = num_kv_heads,
        .head_dim = static_cast<std::int32_t>(key.columns / num_kv_heads)});
}

Program::ValueId Program::attention(std::int32_t layer, std::int32_t num_heads, std::int32_t num_kv_heads, float scale,
                                    std::int32_t window, ValueId q) {
  const Value v = token_value(q);
  require(num_heads >= 1 && v.columns % num_heads == 0,
          number(v.columns) + " columns are not " + number(num_heads) + " heads");
  require(num_kv_heads >= 1 && num_heads % num_kv_heads == 0,
          number(num_heads) + " heads cannot share " + number(num_kv_heads) + " KV heads");
  require(layer >= 0 && window >= 0, "layer and window cannot be negative");
  check_head_dim(v.columns / num_heads);
  const ValueId out = new_value(Rows::kTokens, v.columns);
  emit({.op = Op::kAttention,
        .out = out,
        .in = {q, -1},
        .scalar = scale,
        .index = layer,
        .num_heads = num_heads,
        .num_kv_heads = num_kv_heads,
        .head_dim = static_cast<std::int32_t>(v.columns / num_heads),
        .window = window});
  return out;
}

Program::ValueId Program::silu_mul(ValueId gate, ValueId up) {
  const Value g = value(gate);
  const Value u = value(up);
  require(g.columns == u.columns && g.rows == u.rows, "gate and up differ in shape");
  const ValueId out = new_value(g.rows, g.columns);
  emit({.op = Op::kSiluMul, .out = out, .in = {gate, up}});
  return out;
}

Program::ValueId Program::add(ValueId a, ValueId b) {
  const Value x = value(a);
  const Value y = value(b);
  require(x.columns == y.columns && x.rows == y.rows, "the terms of an addition differ in shape");
  const ValueId out = new_value(x.rows, x.columns);
  emit({.op = Op::kAdd, .out = out, .in = {a, b}});
  return out;
}

Program::ValueId Program::select(ValueId x) {
  const Value v = token_value(x);
  const ValueId out = new_value(Rows::kLogits, v.columns);
  emit({.op = Op::kSelect, .out = out, .in = {x, -1}});
  return out;
}

void Program::finish(ValueId logits) {
  require(logits_ < 0, "the recording has ended");
  require(value(logits).rows == Rows::kLogits, "logits need one row per wanted logit");
  require(!instructions_.empty() && instructions_.back().op == Op::kLinear && instructions_.back().out == logits,
          "logits must be the result of the last instruction, a linear");
  make_phases();
  logits_ = logits;
  assign_slots();
}

Program::Cut Program::cut_of(Op op) {
  switch (op) {
    case Op::kLinear:
      return Cut::kPanels;
    case Op::kAttention:
      return Cut::kAttention;
    default:
      return Cut::kRows;
  }
}

const char* Program::name_of(Op op) {
  switch (op) {
    case Op::kEmbed:
      return "embed";
    case Op::kNorm:
      return "norm";
    case Op::kPrepare:
      return "quantize";
    case Op::kLinear:
      return "linear";
    case Op::kAngles:
      return "angles";
    case Op::kRope:
      return "rope";
    case Op::kKvWrite:
      return "kv_write";
    case Op::kAttention:
      return "attention";
    case Op::kSiluMul:
      return "silu_mul";
    case Op::kAdd:
      return "add";
    case Op::kSelect:
      return "select";
  }
  throw std::logic_error("unknown instruction");
}

std::vector<Program::PhaseFacts> Program::phase_facts() const {
  std::vector<PhaseFacts> facts;
  for (const Phase& phase : phases_) {
    facts.emplace_back();
    for (std::int32_t i = phase.first; i < phase.last; ++i) {
      facts.back().ops.emplace_back(name_of(instructions_[i].op));
      if (instructions_[i].op == Op::kLinear) facts.back().matrices.push_back(instructions_[i].weight);
    }
  }
  return facts;
}

// An instruction joins the phase before it when no barrier is needed between them: row instructions read only their own
// rows of what the phase makes, linears read nothing of it. A select reads other rows, but it is the first to have the
// rows of logits.
void Program::make_phases() {
  for (std::int32_t i = 0; i < num_instructions(); ++i) {
    const Instruction& instruction = instructions_[i];
    const Cut cut = cut_of(instruction.op);
    const ValueId shaped = instruction.out >= 0 ? instruction.out : instruction.in[0];
    const Rows rows = values_[shaped].rows;
    bool joins = !phases_.empty() && phases_.back().cut == cut && phases_.back().rows == rows && cut != Cut::kAttention;
    if (joins && cut == Cut::kPanels)
      for (std::int32_t j = phases_.back().first; j < i; ++j)
        joins = joins && instructions_[j].out != instruction.in[0];
    if (joins)
      phases_.back().last = i + 1;
    else
      phases_.push_back({cut, rows, i, i + 1});
  }
}

std::size_t Program::row_bytes(const Value& value) {
  const auto columns = static_cast<std::size_t>(value.columns);
  switch (value.form) {
    case Form::kFloat:
      return columns * sizeof(float);
    case Form::kBf16:
      return columns * sizeof(std::uint16_t);
    case Form::kQuantized:
      return columns / kQuantBlock * sizeof(QuantBlock);
  }
  throw std::logic_error("unknown form");
}

// A slot is free for a value made in phase p when the phase that last reads its present value lies before p: within a
// phase tiles of different instructions run at the same time.
void Program::assign_slots() {
  std::vector<std::int32_t> last_read(values_.size(), -1);
  for (std::int32_t p = 0; p < num_phases(); ++p)
    for (std::int32_t i = phases_[p].first; i < phases_[p].last; ++i) {
      for (const ValueId in : instructions_[i].in)
        if (in >= 0) last_read[in] = p;
      if (const ValueId out = instructions_[i].out; out >= 0) last_read[out] = p;
    }
  for (std::int32_t p = 0; p < num_phases(); ++p) {
    for (std::int32_t i = phases_[p].first; i < phases_[p].last; ++i) {
      const ValueId out = instructions_[i].out;
      if (out < 0 || out == logits_) continue;
      Value& v = values_[out];
      const std::size_t bytes = row_bytes(v);
      const std::size_t per_token = v.rows == Rows::kTokens ? bytes : 0,
                        per_logit = v.rows == Rows::kLogits ? bytes : 0;
      std::size_t best = slots_.size(), best_growth = SIZE_MAX;
      for (std::size_t s = 0; s < slots_.size(); ++s) {
        if (slots_[s].free_after >= p) continue;
        const std::size_t growth = std::max(slots_[s].per_token, per_token) - slots_[s].per_token +
                                   std::max(slots_[s].per_logit, per_logit) - slots_[s].per_logit;
        if (growth < best_growth) best = s, best_growth = growth;
      }
      if (best == slots_.size()) slots_.emplace_back();
      Slot& slot = slots_[best];
      slot.per_token = std::max(slot.per_token, per_token);
      slot.per_logit = std::max(slot.per_logit, per_logit);
      slot.free_after = last_read[out];
      v.slot = static_cast<std::int32_t>(best);
    }
  }
}

// --- replaying
// ------------------------------------------------------------------------------------------------------------------

void Program::bind(std::shared_ptr<KvStore> cache) {
  require(logits_ >= 0, "the recording has not ended");
  for (const Instruction& instruction : instructions_) {
    if (instruction.op != Op::kKvWrite && instruction.op != Op::kAttention) continue;
    const std::string layer = "layer " + number(instruction.index);
    require(cache->has_layer(instruction.index), layer + " has no KV cache");
    const KvCache& kv = cache->cache(instruction.index);
    require(kv.num_kv_heads == instruction.num_kv_heads && kv.head_dim == instruction.head_dim,
            layer + " has " + number(instruction.num_kv_heads) + " KV heads of " + number(instruction.head_dim) +
                ", its cache " + number(kv.num_kv_heads) + " of " + number(kv.head_dim));
    const std::int32_t kept = cache->group(cache->group_of(instruction.index)).window;
    require(instruction.op == Op::kKvWrite || kept == 0 || (instruction.window > 0 && instruction.window <= kept),
            layer + " sees more tokens than the window of its cache, " + number(kept));
  }
  cache_ = std::move(cache);
}

void Program::check(const Batch& batch) const {
  const auto tokens = static_cast<std::int64_t>(batch.tokens.size());
  require(tokens >= 1 && tokens <= INT32_MAX / 2, "a batch needs at least one token");
  require(batch.positions.size() == batch.tokens.size(), "tokens and positions differ in length");
  require(batch.row_starts.size() >= 2 && batch.row_starts.front() == 0 && batch.row_starts.back() == tokens,
          "row_starts must go from 0 to the number of tokens");
  for (const std::int32_t token : batch.tokens)
    require(token >= 0 && token < vocab_, "token id " + number(token) + " is outside 0.." + number(vocab_ - 1));
  std::int32_t before = -1;
  for (const std::int32_t index : batch.logit_rows) {
    require(index > before && index < tokens, "logit_rows must be ascending indices of tokens");
    before = index;
  }
  require(static_cast<std::int32_t>(batch.tables.size()) == cache_->num_groups(),
          "expected " + number(cache_->num_groups()) + " block tables, got " +
              number(static_cast<std::int64_t>(batch.tables.size())));
  const std::int32_t block_size = cache_->block_size();
  for (std::size_t r = 0; r + 1 < batch.row_starts.size(); ++r) {
    const std::int32_t begin = batch.row_starts[r], end = batch.row_starts[r + 1];
    require(begin < end, "row " + number(static_cast<std::int64_t>(r)) + " has no tokens");
    require(batch.positions[begin] >= 0, "positions cannot be negative");
    require(batch.positions[begin] <= INT32_MAX / 2, "position " + number(batch.positions[begin]) + " is too large");
    for (std::int32_t t = begin + 1; t < end; ++t)
      require(batch.positions[t] == batch.positions[t - 1] + 1, "positions of a row must be consecutive");
    for (std::int32_t g = 0; g < cache_->num_groups(); ++g) {
      const KvGroup& group = cache_->group(g);
      const Batch::Table& table = batch.tables[g];
      const std::int32_t seen_from = group.window > 0 ? std::max(0, batch.positions[begin] - group.window + 1) : 0;
      const std::int32_t last_block = batch.positions[end - 1] / block_size;
      require(last_block < table.columns, "a row's block table is too short for its positions");
      for (std::int64_t b = seen_from / block_size; b <= last_block; ++b) {
        const std::int32_t block = table.blocks[static_cast<std::int64_t>(r) * table.columns + b];
        require(block >= 0 && block < group.num_blocks,
                "block id " + number(block) + " is outside 0.." + number(group.num_blocks - 1));
      }
    }
  }
}

void Program::lay_out(const Step& step) {
  std::size_t total = 0;
  for (Slot& slot : slots_) {
    slot.offset = total;
    total += round_up(std::max(slot.per_token * static_cast<std::size_t>(step.num_tokens),
                               slot.per_logit * static_cast<std::size_t>(step.num_logits)),
                      64);
  }
  if (total > scratch_.size()) {
    scratch_ = Mapping();  // first give back, then take
    scratch_ = Mapping(total, Mapping::Pages::kHuge);
  }
  row_of_token_.resize(static_cast<std::size_t>(step.num_tokens));
  for (std::size_t r = 0; r + 1 < step.batch.row_starts.size(); ++r)
    std::fill(row_of_token_.begin() + step.batch.row_starts[r], row_of_token_.begin() + step.batch.row_starts[r + 1],
              static_cast<std::int32_t>(r));
  query_tile_tokens_ = 0;
}

// Longest contexts first, so that the last tiles to finish are short ones.
void Program::cut_queries(const Batch& batch, std::int32_t tokens_per_tile) {
  if (query_tile_tokens_ == tokens_per_tile) return;
  query_tile_tokens_ = tokens_per_tile;
  query_tiles_.clear();
  for (std::size_t r = 0; r + 1 < batch.row_starts.size(); ++r)
    for (std::int32_t begin = batch.row_starts[r]; begin < batch.row_starts[r + 1]; begin += tokens_per_tile)
      query_tiles_.push_back(
          {static_cast<std::int32_t>(r), begin, std::min(begin + tokens_per_tile, batch.row_starts[r + 1])});
  std::sort(query_tiles_.begin(), query_tiles_.end(), [&](const QueryTile& a, const QueryTile& b) {
    const std::int32_t last_a = batch.positions[a.end - 1], last_b = batch.positions[b.end - 1];
    return last_a != last_b ? last_a > last_b : a.begin < b.begin;
  });
}

std::uint8_t* Program::address(const Step& step, ValueId id) const {
  if (id == logits_) return reinterpret_cast<std::uint8_t*>(step.logits);
  return scratch_.data() + slots_[values_[id].slot].offset;
}

float* Program::row(const Step& step, ValueId id, std::int64_t index) const {
  return reinterpret_cast<float*>(address(step, id)) + index * values_[id].columns;
}

Logits Program::run(Pool& pool, const Batch& batch) {
  require(cache_ != nullptr, "no KV cache is bound");
  require(weights_->allocated(), "the weights are not allocated");
  check(batch);
  const auto num_logits = static_cast<std::int64_t>(batch.logit_rows.size());
  const std::int64_t columns = values_[logits_].columns;
  const std::size_t logits_bytes =
      std::max<std::size_t>(1, sizeof(float) * static_cast<std::size_t>(num_logits * columns));
  const std::size_t held = logits_memory_ == nullptr ? 0 : logits_memory_->size();
  if (held < logits_bytes || (held > kKeptLogitsBytes && held / 4 > logits_bytes)) {
    logits_memory_.reset();
    logits_memory_ = std::make_shared<Mapping>(logits_bytes, Mapping::Pages::kHuge);
  }
  const Step step{batch, static_cast<std::int64_t>(batch.tokens.size()), num_logits,
                  reinterpret_cast<float*>(logits_memory_->data())};
  lay_out(step);
  const KernelFpu fpu;
  if (phase_seconds_ != nullptr) phase_seconds_->clear();
  for (const Phase& phase : phases_) {
    if (phase_seconds_ == nullptr) {
      run_phase(pool, step, phase);
      continue;
    }
    const auto start = std::chrono::steady_clock::now();
    run_phase(pool, step, phase);
    phase_seconds_->push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return {logits_memory_, num_logits, columns};
}

void Program::run_phase(Pool& pool, const Step& step, const Phase& phase) {
  switch (phase.cut) {
    case Cut::kRows:
      return run_row_phase(pool, step, phase);
    case Cut::kPanels:
      return run_panel_phase(pool, step, phase);
    case Cut::kAttention:
      return run_attention(pool, step, instructions_[phase.first]);
  }
}

void Program::run_row_phase(Pool& pool, const Step& step, const Phase& phase) {
  const std::int64_t rows = phase.rows == Rows::kTokens ? step.num_tokens : step.num_logits;
  const std::int64_t wanted_tiles = kRowTilesPerThread * pool.threads();
  const std::int64_t per_tile = std::clamp<std::int64_t>((rows + wanted_tiles - 1) / wanted_tiles, 1, kMostRowsPerTile);
  pool.parallel_for(static_cast<std::int32_t>((rows + per_tile - 1) / per_tile), [&](std::int32_t tile) {
    const std::int64_t begin = tile * per_tile, end = std::min(rows, begin + per_tile);
    for (std::int32_t i = phase.first; i < phase.last; ++i)
      for (std::int64_t r = begin; r < end; ++r) run_row(step, instructions_[i], r);
  });
}

void Program::run_panel_phase(Pool& pool, const Step& step, const Phase& phase) {
  const std::int64_t rows = phase.rows == Rows::kTokens ? step.num_tokens : step.num_logits;
  if (rows == 0) return;
  std::int64_t panels = 0;
  for (std::int32_t i = phase.first; i < phase.last; ++i)
    panels += num_panels(weights_->matrix(instructions_[i].weight));
  const std::int64_t grain = std::max<std::int64_t>(1, panels / (kPanelTilesPerThread * pool.threads()));
  const auto tiles_of = [&](std::int32_t i) {
    return (num_panels(weights_->matrix(instructions_[i].weight)) + grain - 1) / grain;
  };
  std::int64_t tiles = 0;
  for (std::int32_t i = phase.first; i < phase.last; ++i) tiles += tiles_of(i);
  pool.parallel_for(static_cast<std::int32_t>(tiles), [&](std::int32_t tile) {
    std::int32_t i = phase.first;
    std::int64_t index = tile;
    for (; index >= tiles_of(i); ++i) index -= tiles_of(i);
    const Instruction& instruction = instructions_[i];
    const PackedMatrix matrix = weights_->matrix(instruction.weight);
    const LinearArgs args{matrix,
                          {rows, matrix.k, address(step, instruction.in[0])},
                          instruction.bias >= 0 ? weights_->vector(instruction.bias).data() : nullptr,
                          row(step, instruction.out, 0),
                          matrix.n};
    kernels_.linear(args, index * grain, std::min(num_panels(matrix), (index + 1) * grain));
  });
}

AttendArgs Program::attend_args(const Step& step, const Instruction& instruction, const QueryTile& queries,
                                std::int32_t kv_head) const {
  const Batch::Table& table = step.batch.tables[cache_->group_of(instruction.index)];
  return {cache_->cache(instruction.index),
          row(step, instruction.in[0], 0),
          row(step, instruction.out, 0),
          instruction.num_heads,
          instruction.scalar,
          instruction.window,
          step.batch.positions.data(),
          table.blocks + queries.row * table.columns,
          queries.begin,
          queries.end,
          kv_head};
}

void Program::run_attention(Pool& pool, const Step& step, const Instruction& instruction) {
  const std::int32_t heads_per_kv = instruction.num_heads / instruction.num_kv_heads;
  cut_queries(step.batch, std::max(1, kQueryRows / heads_per_kv));
  const auto tiles = static_cast<std::int32_t>(query_tiles_.size()) * instruction.num_kv_heads;
  if (pool.threads() > 1 && tiles < kQueryTilesPerThread * pool.threads() &&
      step.batch.positions[query_tiles_.front().end - 1] >= kKvSplit)
    return run_split_attention(pool, step, instruction);
  pool.parallel_for(tiles, [&](std::int32_t tile) {
    kernels_.attend(
        attend_args(step, instruction, query_tiles_[tile / instruction.num_kv_heads], tile % instruction.num_kv_heads));
  });
}

// The same arithmetic with every split of the context computed by itself; the caller merges them.
void Program::run_split_attention(Pool& pool, const Step& step, const Instruction& instruction) {
  const std::int32_t kv_heads = instruction.num_kv_heads, heads_per_kv = instruction.num_heads / kv_heads;
  const std::int64_t size = attend_partial_size(instruction.head_dim);
  const auto rows_of = [&](const QueryTile& queries) { return (queries.end - queries.begin) * heads_per_kv; };
  split_tiles_.clear();
  std::int64_t floats = 0;
  for (std::size_t t = 0; t < query_tiles_.size(); ++t) {
    const QueryTile& queries = query_tiles_[t];
    const std::int32_t first = step.batch.positions[queries.begin], last = step.batch.positions[queries.end - 1];
    const std::int32_t seen_from = instruction.window > 0 ? std::max(0, first - instruction.window + 1) : 0;
    for (std::int32_t split = seen_from / kKvSplit * kKvSplit; split <= last; split += kKvSplit) {
      split_tiles_.push_back({static_cast<std::int32_t>(t), split, floats});
      floats += kv_heads * rows_of(queries) * size;
    }
  }
  if (partials_.size() < static_cast<std::size_t>(floats)) partials_.resize(static_cast<std::size_t>(floats));
  pool.parallel_for(static_cast<std::int32_t>(split_tiles_.size()) * kv_heads, [&](std::int32_t index) {
    const SplitTile& part = split_tiles_[index / kv_heads];
    const QueryTile& queries = query_tiles_[part.tile];
    AttendArgs args = attend_args(step, instruction, queries, index % kv_heads);
    args.split = part.split;
    args.partials = partials_.data() + part.partials + index % kv_heads * rows_of(queries) * size;
    kernels_.attend(args);
  });
  for (std::size_t first = 0, last = 0; first < split_tiles_.size(); first = last) {
    while (last < split_tiles_.size() && split_tiles_[last].tile == split_tiles_[first].tile) ++last;
    const QueryTile& queries = query_tiles_[split_tiles_[first].tile];
    const std::int32_t rows = rows_of(queries);
    for (std::int32_t i = 0; i < kv_heads * rows; ++i) {
      const std::int32_t kv_head = i / rows, token = queries.begin + i % rows / heads_per_kv;
      const std::int32_t head = kv_head * heads_per_kv + i % heads_per_kv;
      kernels_.merge_splits(partials_.data() + split_tiles_[first].partials + i * size,
                            static_cast<std::int64_t>(last - first), kv_heads * rows * size, instruction.head_dim,
                            row(step, instruction.out, token) + head * instruction.head_dim);
    }
  }
}

void Program::run_row(const Step& step, const Instruction& instruction, std::int64_t index) const {
  const ValueId a = instruction.in[0], b = instruction.in[1], out = instruction.out;
  switch (instruction.op) {
    case Op::kEmbed:
      return unpack_row(weights_->matrix(instruction.weight), step.batch.tokens[index], row(step, out, index));
    case Op::kNorm:
      return kernels_.rms_norm(row(step, a, index), weights_->vector(instruction.weight).data(), values_[a].columns,
                               instruction.scalar, row(step, out, index));
    case Op::kPrepare: {
      std::uint8_t* to = address(step, out) + static_cast<std::size_t>(index) * row_bytes(values_[out]);
      if (values_[out].form == Form::kQuantized)
        return kernels_.quantize_row(row(step, a, index), values_[a].columns, reinterpret_cast<QuantBlock*>(to));
      return kernels_.to_bf16_row(row(step, a, index), values_[a].columns, reinterpret_cast<std::uint16_t*>(to));
    }
    case Op::kAngles: {
      const Frequencies& frequencies = frequencies_[instruction.index];
      const std::size_t pairs = frequencies.inverse.size();
      float* to = row(step, out, index);
      for (std::size_t i = 0; i < pairs; ++i) {
        const double angle = step.batch.positions[index] * frequencies.inverse[i];
        to[i] = static_cast<float>(std::cos(angle)) * frequencies.magnitude;
        to[pairs + i] = static_cast<float>(std::sin(angle)) * frequencies.magnitude;
      }
      return;
    }
    case Op::kRope: {
      const std::int64_t rotated = values_[b].columns;
      const float* cos = row(step, b, index);
      return kernels_.rope(row(step, a, index), values_[a].columns / instruction.head_dim, instruction.head_dim,
                           rotated, instruction.interleaved, cos, cos + rotated / 2, row(step, out, index));
    }
    case Op::kKvWrite: {
      const Batch::Table& table = step.batch.tables[cache_->group_of(instruction.index)];
      const std::int32_t position = step.batch.positions[index], size = cache_->block_size();
      const std::int32_t block = table.blocks[row_of_token_[index] * table.columns + position / size];
      return kernels_.kv_write(cache_->cache(instruction.index), row(step, a, index), row(step, b, index), block,
                               position % size);
    }
    case Op::kSiluMul:
      return kernels_.silu_mul(row(step, a, index), row(step, b, index), values_[a].columns, row(step, out, index));
    case Op::kAdd:
      return kernels_.add(row(step, a, index), row(step, b, index), values_[a].columns, row(step, out, index));
    case Op::kSelect:
      std::memcpy(row(step, out, index), row(step, a, step.batch.logit_rows[index]),
                  sizeof(float) * static_cast<std::size_t>(values_[a].columns));
      return;
    case Op::kLinear:
    case Op::kAttention:
      throw std::logic_error("not a row instruction");
  }
}

}  // namespace octavo
