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

// Enough that a slow thread does not hold up the others, few enough that claiming costs nothing.
constexpr std::int64_t kRowTilesPerThread = 4;
// Fewer are not worth a barrier; of more, what one instruction writes would not stay in cache for the next.
constexpr std::int64_t kLeastRowsPerTile = 4, kMostRowsPerTile = 16;
// Columns are divided in units of a whole block, so that a tile can be quantized.
constexpr std::int64_t kUnitPanels = kQuantBlock / kPanel;
// Of what a thread computes and reads again at once: half of a common second-level cache.
constexpr std::int64_t kTileBytes = 512 << 10;
constexpr std::int64_t kMostOwnRows = 8;  // that every thread makes for itself, rather than wait for
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

Program::Program(const Kernels& kernels, std::shared_ptr<Weights> weights)
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

void Program::finish(ValueId logits, bool fused) {
  require(logits_ < 0, "the recording has ended");
  require(value(logits).rows == Rows::kLogits, "logits need one row per wanted logit");
  require(!instructions_.empty() && instructions_.back().op == Op::kLinear && instructions_.back().out == logits,
          "logits must be the result of the last instruction, a linear");
  make_phases();
  logits_ = logits;
  if (fused) fuse();
  place_values();
  assign_slots();
  count_linears();
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
    for (const auto* list : {&phase.before, &phase.main, &phase.after})
      for (const std::int32_t i : *list) {
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
    if (joins && cut == Cut::kPanels) joins = !made_in(instruction.in[0], phases_.back().main);
    if (!joins) phases_.push_back({cut, rows, {}, {}, -1, {}});
    phases_.back().main.push_back(i);
  }
}

// The fusion table. What a layer becomes: norm, quantize, Q, K and V | rope and write | attention, quantize |
// O, add | norm, quantize, gate and up, activation, quantize | down, add.
const Program::Fusion Program::kFusions[] = {
    // A panel phase reads whole rows, which few rows make cheaper to compute in every thread than to wait for.
    {Op::kSelect, Cut::kPanels, Fusion::Side::kBefore},
    {Op::kNorm, Cut::kPanels, Fusion::Side::kBefore},
    {Op::kPrepare, Cut::kPanels, Fusion::Side::kBefore},
    // What works column by column, or block of columns by block, can follow a tile while it is in cache.
    {Op::kAdd, Cut::kPanels, Fusion::Side::kAfter},
    {Op::kSiluMul, Cut::kPanels, Fusion::Side::kAfter},
    {Op::kPrepare, Cut::kPanels, Fusion::Side::kAfter},
    {Op::kPrepare, Cut::kAttention, Fusion::Side::kAfter},
};

// Row phases lend their first instructions to the phase before and their last ones to the phase after.
void Program::fuse() {
  const auto listed = [](Op op, Cut host, Fusion::Side side) {
    return std::any_of(std::begin(kFusions), std::end(kFusions),
                       [&](const Fusion& f) { return f.op == op && f.host == host && f.side == side; });
  };
  for (std::size_t p = 0; p < phases_.size(); ++p) {
    Phase& home = phases_[p];
    if (home.cut != Cut::kRows) continue;
    if (p > 0) {
      Phase& host = phases_[p - 1];
      std::vector<std::int32_t> rest;
      for (const std::int32_t i : home.main) {
        const Instruction& instruction = instructions_[i];
        const bool moves = listed(instruction.op, host.cut, Fusion::Side::kAfter) && host.rows == home.rows &&
                           may_follow(instruction, host, rest);
        (moves ? host.after : rest).push_back(i);
      }
      home.main = std::move(rest);
    }
    if (p + 1 < phases_.size()) {
      Phase& host = phases_[p + 1];
      while (!home.main.empty()) {
        const Instruction& instruction = instructions_[home.main.back()];
        if (!listed(instruction.op, host.cut, Fusion::Side::kBefore) || host.rows != home.rows ||
            !may_precede(instruction, host))
          break;
        host.before.insert(host.before.begin(), home.main.back());
        home.main.pop_back();
      }
    }
  }
  std::erase_if(phases_, [](const Phase& phase) { return phase.main.empty(); });
  for (Phase& phase : phases_) phase.pair = pair_of(phase);
}

// Two matrices whose products are multiplied with each other are stored panel by panel in turn, so that a tile of both
// is one stream. -1 for other phases.
std::int32_t Program::pair_of(const Phase& phase) const {
  if (phase.main.size() != 2 || phase.after.empty()) return -1;
  const Instruction &gate = instructions_[phase.main[0]], &up = instructions_[phase.main[1]];
  const Instruction& product = instructions_[phase.after[0]];
  if (product.op != Op::kSiluMul || product.in[0] != gate.out || product.in[1] != up.out) return -1;
  if (gate.in[0] != up.in[0] || gate.bias >= 0 || up.bias >= 0) return -1;
  for (std::int32_t i = 0; i < num_instructions(); ++i)
    if (i != phase.after[0] && (reads(i, gate.out) || reads(i, up.out))) return -1;
  return weights_->interleave(gate.weight, up.weight);
}

bool Program::made_in(ValueId id, const std::vector<std::int32_t>& instructions) const {
  return std::any_of(instructions.begin(), instructions.end(),
                     [&](std::int32_t i) { return instructions_[i].out == id; });
}

bool Program::reads(std::int32_t instruction, ValueId id) const {
  const ValueId(&in)[2] = instructions_[instruction].in;
  return in[0] == id || in[1] == id;
}

// Whether an instruction finds all it reads once a tile of the phase has been computed: what the phase makes, in the
// tile's columns, or what was there before. `staying` are the instructions between that do not move.
bool Program::may_follow(const Instruction& instruction, const Phase& host,
                         const std::vector<std::int32_t>& staying) const {
  bool follows = false;
  for (const ValueId in : instruction.in) {
    if (in < 0) continue;
    if (made_in(in, staying)) return false;
    follows = follows || made_in(in, host.main) || made_in(in, host.after);
  }
  if (!follows) return false;
  const std::int64_t columns = values_[instruction.out].columns;
  std::int64_t unit = kPanel;
  for (const std::int32_t i : host.main) {
    if (values_[instructions_[i].out].columns != columns) return false;
    if (host.cut == Cut::kAttention) unit = columns / instructions_[i].num_kv_heads;
  }
  return host.cut == Cut::kPanels || values_[instruction.out].form != Form::kQuantized || unit % kQuantBlock == 0;
}

// Whether only this phase reads what the instruction makes.
bool Program::may_precede(const Instruction& instruction, const Phase& host) const {
  for (std::int32_t i = 0; i < num_instructions(); ++i) {
    const auto here = [i](const std::vector<std::int32_t>& list) {
      return std::find(list.begin(), list.end(), i) != list.end();
    };
    if (reads(i, instruction.out) && !here(host.before) && !here(host.main)) return false;
  }
  return true;
}

// Values that never leave a tile or a thread.
void Program::place_values() {
  for (const Phase& phase : phases_) {
    std::int64_t bytes = 0;
    for (const std::int32_t i : phase.before) {
      Value& v = values_[instructions_[i].out];
      v.own_row = bytes;
      bytes += static_cast<std::int64_t>(round_up(row_bytes(v), 64));
    }
    if (phase.cut != Cut::kPanels) continue;
    std::int32_t tiles = 0;
    for (const auto* list : {&phase.main, &phase.after})
      for (const std::int32_t i : *list) {
        const ValueId out = instructions_[i].out;
        bool stays = out != logits_ && values_[out].form == Form::kFloat && !phase.after.empty();
        for (std::int32_t j = 0; j < num_instructions(); ++j)
          if (reads(j, out)) stays = stays && std::find(phase.after.begin(), phase.after.end(), j) != phase.after.end();
        if (stays) values_[out].own_tile = tiles++;
      }
  }
}

std::size_t Program::columns_bytes(Form form, std::int64_t columns) {
  const auto count = static_cast<std::size_t>(columns);
  switch (form) {
    case Form::kFloat:
      return count * sizeof(float);
    case Form::kBf16:
      return count * sizeof(std::uint16_t);
    case Form::kQuantized:
      return count / kQuantBlock * sizeof(QuantBlock);
  }
  throw std::logic_error("unknown form");
}

std::size_t Program::row_bytes(const Value& value) { return columns_bytes(value.form, value.columns); }

// A slot is free for a value made in phase p when the phase that last reads its present value lies before p: within a
// phase tiles of different instructions run at the same time.
void Program::assign_slots() {
  std::vector<std::int32_t> last_read(values_.size(), -1);
  const auto each = [&](const auto& visit) {
    for (std::int32_t p = 0; p < num_phases(); ++p)
      for (const auto* list : {&phases_[p].before, &phases_[p].main, &phases_[p].after})
        for (const std::int32_t i : *list) visit(p, instructions_[i]);
  };
  each([&](std::int32_t p, const Instruction& instruction) {
    for (const ValueId in : instruction.in)
      if (in >= 0) last_read[in] = p;
    if (instruction.out >= 0) last_read[instruction.out] = p;
  });
  each([&](std::int32_t p, const Instruction& instruction) {
    const ValueId out = instruction.out;
    if (out < 0 || out == logits_ || values_[out].own_tile >= 0) return;
    Value& v = values_[out];
    const std::size_t bytes = row_bytes(v);
    const std::size_t per_token = v.rows == Rows::kTokens ? bytes : 0, per_logit = v.rows == Rows::kLogits ? bytes : 0;
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
  });
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
  count_attention();
}

void Program::count_linears() {
  for (const Instruction& instruction : instructions_) {
    if (instruction.op != Op::kLinear) continue;
    const PackedMatrix matrix = weights_->matrix(instruction.weight);
    Work& work = values_[instruction.out].rows == Rows::kTokens ? per_token_ : per_logit_;
    work.weight_bytes += weights_->matrix_bytes(instruction.weight);
    work.operations += 2 * matrix.n * matrix.k;
  }
}

void Program::count_attention() {
  seen_.clear();
  for (const Instruction& instruction : instructions_) {
    if (instruction.op != Op::kAttention) continue;
    const KvCache& kv = cache_->cache(instruction.index);
    auto same = std::find_if(seen_.begin(), seen_.end(), [&](const Seen& s) { return s.window == instruction.window; });
    if (same == seen_.end()) same = seen_.insert(same, {instruction.window, 0, 0});
    same->token_bytes += kv.num_kv_heads * kv_head_bytes(kv.format, kv.block_size, kv.head_dim) / kv.block_size;
    same->operations += std::int64_t{4} * instruction.num_heads * instruction.head_dim;
  }
}

Work Program::work_of(const Step& step) const {
  Work work;
  for (const auto& [per_row, rows] :
       {std::pair(&per_token_, step.num_tokens), std::pair(&per_logit_, step.num_logits)}) {
    if (rows > 0) work.weight_bytes += per_row->weight_bytes;
    work.operations += rows * per_row->operations;
  }
  const Batch& batch = step.batch;
  for (const Seen& seen : seen_) {
    for (std::size_t r = 0; r + 1 < batch.row_starts.size(); ++r) {
      const std::int64_t first = batch.positions[batch.row_starts[r]],
                         last = batch.positions[batch.row_starts[r + 1] - 1];
      const std::int64_t from = seen.window > 0 ? std::max<std::int64_t>(0, first - seen.window + 1) : 0;
      work.kv_bytes += (last - from + 1) * seen.token_bytes;
    }
    for (const std::int32_t position : batch.positions)
      work.operations += (seen.window > 0 ? std::min(position + 1, seen.window) : position + 1) * seen.operations;
  }
  return work;
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
    require(begin < end && end <= tokens, "row_starts must ascend to the number of tokens");
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

void Program::lay_out(const Step& step, int threads) {
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

  std::size_t own = 0;
  for (const Phase& phase : phases_) own = std::max(own, own_rows_bytes(step, phase) + own_tiles_bytes(step, phase));
  own_bytes_ = round_up(own, 4096);
  if (own_bytes_ * static_cast<std::size_t>(threads) > own_memory_.size()) {
    own_memory_ = Mapping();
    own_memory_ = Mapping(own_bytes_ * static_cast<std::size_t>(threads), Mapping::Pages::kHuge);
  }
  fresh_.resize(static_cast<std::size_t>(threads));
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

std::size_t Program::own_rows_bytes(const Step& step, const Phase& phase) const {
  const std::int64_t rows = step.rows(phase.rows);
  if (phase.before.empty() || rows > kMostOwnRows) return 0;
  const Value& last = values_[instructions_[phase.before.back()].out];
  return (static_cast<std::size_t>(last.own_row) + round_up(row_bytes(last), 64)) * static_cast<std::size_t>(rows);
}

std::int64_t Program::own_tiles(const Phase& phase) const {
  std::int64_t values = 0;
  for (const auto* list : {&phase.main, &phase.after})
    for (const std::int32_t i : *list)
      values += instructions_[i].out >= 0 && values_[instructions_[i].out].own_tile >= 0;
  return values;
}

// The most panels of a matrix in one tile of a panel phase with `after`.
std::int64_t Program::tile_panels(const Step& step, const Phase& phase) const {
  const std::int64_t panels = num_panels(weights_->matrix(instructions_[phase.main.front()].weight));
  const std::int64_t panel_bytes =
      own_tiles(phase) * step.rows(phase.rows) * kPanel * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t most = panel_bytes == 0 ? panels : kTileBytes / panel_bytes / kUnitPanels * kUnitPanels;
  return std::clamp(most, kUnitPanels, (panels + kUnitPanels - 1) / kUnitPanels * kUnitPanels);
}

std::size_t Program::own_tiles_bytes(const Step& step, const Phase& phase) const {
  const std::int64_t values = own_tiles(phase);
  return values == 0 ? 0
                     : static_cast<std::size_t>(values * step.rows(phase.rows) * tile_panels(step, phase) * kPanel) *
                           sizeof(float);
}

// Of a value's row `index` from `column` on.
std::uint8_t* Program::address(const Step& step, const Place& place, ValueId id, std::int64_t index,
                               std::int64_t column) const {
  const Value& v = values_[id];
  if (v.own_tile >= 0)
    return reinterpret_cast<std::uint8_t*>(place.own_tile + (v.own_tile * place.rows + index) * place.width + column -
                                           place.column);
  std::uint8_t* rows = id == logits_                                 ? reinterpret_cast<std::uint8_t*>(step.logits)
                       : v.own_row >= 0 && place.own_rows != nullptr ? place.own_rows + v.own_row * place.rows
                                                                     : scratch_.data() + slots_[v.slot].offset;
  return rows + index * static_cast<std::int64_t>(row_bytes(v)) +
         static_cast<std::int64_t>(columns_bytes(v.form, column));
}

float* Program::row(const Step& step, const Place& place, ValueId id, std::int64_t index) const {
  return reinterpret_cast<float*>(address(step, place, id, index, place.column));
}

Logits Program::run(Pool& pool, const Batch& batch) {
  const auto started = std::chrono::steady_clock::now();
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
  lay_out(step, pool.threads());
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
  work_ = work_of(step);
  work_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  return {logits_memory_, num_logits, columns};
}

void Program::run_phase(Pool& pool, const Step& step, const Phase& phase) {
  if (step.rows(phase.rows) == 0) return;
  switch (phase.cut) {
    case Cut::kRows:
      return run_rows(pool, step, phase.rows, phase.main);
    case Cut::kPanels:
      return run_panels(pool, step, phase);
    case Cut::kAttention:
      return run_attention(pool, step, phase);
  }
}

void Program::run_rows(Pool& pool, const Step& step, Rows of, const std::vector<std::int32_t>& instructions) {
  const std::int64_t rows = step.rows(of);
  const std::int64_t wanted_tiles = kRowTilesPerThread * pool.threads();
  const std::int64_t per_tile =
      std::clamp((rows + wanted_tiles - 1) / wanted_tiles, kLeastRowsPerTile, kMostRowsPerTile);
  pool.parallel_for(static_cast<std::int32_t>((rows + per_tile - 1) / per_tile), [&](std::int32_t tile) {
    run_tile(step, {}, instructions, tile * per_tile, std::min(rows, (tile + 1) * per_tile));
  });
}

void Program::run_panels(Pool& pool, const Step& step, const Phase& phase) {
  const std::int64_t rows = step.rows(phase.rows);
  const bool own_rows = own_rows_bytes(step, phase) > 0;
  if (!phase.before.empty() && !own_rows) run_rows(pool, step, phase.rows, phase.before);
  ++phase_count_;

  const bool together = !phase.after.empty();
  const std::int64_t unit = together ? kUnitPanels : 1;
  const auto panels_of = [&](std::int32_t i) { return num_panels(weights_->matrix(instructions_[i].weight)); };
  std::int64_t panels = 0;
  for (const std::int32_t i : phase.main) panels = together ? panels_of(i) : panels + panels_of(i);

  pool.parallel_ranges(static_cast<std::int32_t>((panels + unit - 1) / unit), [&](std::int32_t begin, std::int32_t end,
                                                                                  int thread) {
    std::uint8_t* own = own_memory_.data() + static_cast<std::size_t>(thread) * own_bytes_;
    Place place{.rows = rows};
    if (own_rows) {
      place.own_rows = own;
      if (fresh_[static_cast<std::size_t>(thread)].phase != phase_count_) {
        run_tile(step, place, phase.before, 0, rows);
        fresh_[static_cast<std::size_t>(thread)].phase = phase_count_;
      }
    }
    std::int64_t first = begin * unit;
    std::int64_t last = std::min(panels, end * unit);
    if (!together) {
      for (const std::int32_t i : phase.main) {
        const std::int64_t size = panels_of(i), stop = std::min(last, size);
        if (first < stop) multiply(step, place, instructions_[i], first, stop);
        first = std::max<std::int64_t>(0, first - size);
        last -= size;
      }
      return;
    }
    const std::int64_t most = tile_panels(step, phase);
    place.own_tile = reinterpret_cast<float*>(own + own_rows_bytes(step, phase));
    place.width = most * kPanel;
    for (std::int64_t stop; first < last; first = stop) {
      stop = std::min(last, first + most);
      place.column = first * kPanel;
      place.columns = std::min(stop * kPanel, values_[instructions_[phase.main.front()].out].columns) - place.column;
      place.interleaved = phase.pair >= 0;
      if (place.interleaved)
        multiply_pair(step, place, phase, first, stop);
      else
        for (const std::int32_t i : phase.main) multiply(step, place, instructions_[i], first, stop);
      run_tile(step, place, phase.after, 0, rows);
    }
  });
}

// Panels begin..end-1 of a matrix times all rows.
void Program::multiply(const Step& step, Place place, const Instruction& instruction, std::int64_t begin,
                       std::int64_t end) const {
  PackedMatrix matrix = weights_->matrix(instruction.weight);
  const std::int64_t stride = values_[instruction.out].own_tile >= 0 ? place.width : matrix.n;
  const void* input = address(step, place, instruction.in[0], 0, 0);
  place.column = begin * kPanel;
  const float* bias = instruction.bias >= 0 ? weights_->vector(instruction.bias).data() + place.column : nullptr;
  matrix.n -= place.column;
  matrix.data += begin * matrix.panel_bytes;
  kernels_.linear({matrix, {place.rows, matrix.k, input}, bias, row(step, place, instruction.out, 0), stride}, 0,
                  end - begin);
}

// The same for the two matrices of a phase at once: 16 columns of one, 16 of the other, and so on.
void Program::multiply_pair(const Step& step, const Place& place, const Phase& phase, std::int64_t begin,
                            std::int64_t end) const {
  PackedMatrix matrix = weights_->pair(phase.pair);
  const void* input = address(step, place, instructions_[phase.main[0]].in[0], 0, 0);
  matrix.n -= 2 * begin * kPanel;
  matrix.data += 2 * begin * matrix.panel_bytes;
  kernels_.linear({matrix, {place.rows, matrix.k, input}, nullptr, place.own_tile, 2 * place.width}, 0,
                  2 * (end - begin));
}

// All instructions on one row, then on the next, so that what one writes is in cache for the other.
void Program::run_tile(const Step& step, const Place& place, const std::vector<std::int32_t>& instructions,
                       std::int64_t begin, std::int64_t end) const {
  for (std::int64_t index = begin; index < end; ++index)
    for (const std::int32_t i : instructions) run_row(step, place, instructions_[i], index);
}

AttendArgs Program::attend_args(const Step& step, const Instruction& instruction, const QueryTile& queries,
                                std::int32_t kv_head) const {
  const Batch::Table& table = step.batch.tables[cache_->group_of(instruction.index)];
  return {cache_->cache(instruction.index),
          row(step, {}, instruction.in[0], 0),
          row(step, {}, instruction.out, 0),
          instruction.num_heads,
          instruction.scalar,
          instruction.window,
          step.batch.positions.data(),
          table.blocks + queries.row * table.columns,
          queries.begin,
          queries.end,
          kv_head};
}

void Program::run_attention(Pool& pool, const Step& step, const Phase& phase) {
  const Instruction& instruction = instructions_[phase.main.front()];
  const std::int32_t heads_per_kv = instruction.num_heads / instruction.num_kv_heads;
  cut_queries(step.batch, std::max(1, kQueryRows / heads_per_kv));
  const auto tiles = static_cast<std::int32_t>(query_tiles_.size()) * instruction.num_kv_heads;
  if (pool.threads() > 1 && tiles < kQueryTilesPerThread * pool.threads() &&
      step.batch.positions[query_tiles_.front().end - 1] >= kKvSplit) {
    run_split_attention(pool, step, instruction);
    return run_tile(step, {}, phase.after, 0, step.num_tokens);
  }
  pool.parallel_for(tiles, [&](std::int32_t tile) {
    const QueryTile& queries = query_tiles_[tile / instruction.num_kv_heads];
    const std::int32_t kv_head = tile % instruction.num_kv_heads;
    kernels_.attend(attend_args(step, instruction, queries, kv_head));
    const std::int64_t columns = heads_per_kv * instruction.head_dim;
    run_tile(step, {.column = kv_head * columns, .columns = columns}, phase.after, queries.begin, queries.end);
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
                            row(step, {}, instruction.out, token) + head * instruction.head_dim);
    }
  }
}

// On the columns of the place; instructions that need whole rows run only where those are all.
void Program::run_row(const Step& step, const Place& place, const Instruction& instruction, std::int64_t index) const {
  const ValueId a = instruction.in[0], b = instruction.in[1], out = instruction.out;
  const std::int64_t columns = place.columns > 0 || a < 0 ? place.columns : values_[a].columns;  // a < 0: no input
  switch (instruction.op) {
    case Op::kEmbed:
      return unpack_row(weights_->matrix(instruction.weight), step.batch.tokens[index], row(step, place, out, index));
    case Op::kNorm:
      return kernels_.rms_norm(row(step, place, a, index), weights_->vector(instruction.weight).data(), columns,
                               instruction.scalar, row(step, place, out, index));
    case Op::kPrepare: {
      std::uint8_t* to = address(step, place, out, index, place.column);
      if (values_[out].form == Form::kQuantized)
        return kernels_.quantize_row(row(step, place, a, index), columns, reinterpret_cast<QuantBlock*>(to));
      return kernels_.to_bf16_row(row(step, place, a, index), columns, reinterpret_cast<std::uint16_t*>(to));
    }
    case Op::kAngles: {
      const Frequencies& frequencies = frequencies_[instruction.index];
      const std::size_t pairs = frequencies.inverse.size();
      float* to = row(step, place, out, index);
      for (std::size_t i = 0; i < pairs; ++i) {
        const double angle = step.batch.positions[index] * frequencies.inverse[i];
        to[i] = static_cast<float>(std::cos(angle)) * frequencies.magnitude;
        to[pairs + i] = static_cast<float>(std::sin(angle)) * frequencies.magnitude;
      }
      return;
    }
    case Op::kRope: {
      const std::int64_t rotated = values_[b].columns;
      const float* cos = row(step, place, b, index);
      return kernels_.rope(row(step, place, a, index), values_[a].columns / instruction.head_dim, instruction.head_dim,
                           rotated, instruction.interleaved, cos, cos + rotated / 2, row(step, place, out, index));
    }
    case Op::kKvWrite: {
      const Batch::Table& table = step.batch.tables[cache_->group_of(instruction.index)];
      const std::int32_t position = step.batch.positions[index], size = cache_->block_size();
      const std::int32_t block = table.blocks[row_of_token_[index] * table.columns + position / size];
      return kernels_.kv_write(cache_->cache(instruction.index), row(step, place, a, index), row(step, place, b, index),
                               block, position % size);
    }
    case Op::kSiluMul:
      if (place.interleaved)
        return kernels_.silu_mul_panels(place.own_tile + 2 * index * place.width, columns / kPanel,
                                        row(step, place, out, index));
      return kernels_.silu_mul(row(step, place, a, index), row(step, place, b, index), columns,
                               row(step, place, out, index));
    case Op::kAdd:
      return kernels_.add(row(step, place, a, index), row(step, place, b, index), columns,
                          row(step, place, out, index));
    case Op::kSelect:
      std::memcpy(row(step, place, out, index), row(step, place, a, step.batch.logit_rows[index]),
                  sizeof(float) * static_cast<std::size_t>(columns));
      return;
    case Op::kLinear:
    case Op::kAttention:
      throw std::logic_error("not a row instruction");
  }
}

}  // namespace octavo
