// A recorded forward: a list of instructions over symbolic values, replayed for any batch in one call.
//
// Recording: each method appends one instruction and returns the value it makes. A value is [T, columns] or [S,
// columns], where T is the number of a batch's tokens and S that of its wanted logits. `finish` ends it: instructions
// become phases (what may run between two barriers), and a table says which of them move into the phase before or
// after (kFusions in program.cpp). Values become slots of one scratch buffer, reused once a value is dead, or stay in
// memory of the thread that makes and reads them.
//
// No instruction couples two rows, except attention through the KV cache; and fusion moves instructions but changes
// none. So neither batch nor threads nor fusion can change a row's bits. Knows rows, positions and block tables; not
// requests, sampling or who owns which block.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/kv_store.h"
#include "core/memory.h"
#include "core/pool.h"
#include "core/weights.h"
#include "kernels/kernels.h"

namespace octavo {

// One step's rows, see octavo.backends.base.Batch. Borrowed for the call.
struct Batch {
  struct Table {
    const std::int32_t* blocks;  // [rows, columns]
    std::int64_t columns;
  };
  std::span<const std::int32_t> tokens;      // [T]
  std::span<const std::int32_t> positions;   // [T]
  std::span<const std::int32_t> row_starts;  // [R + 1]
  std::span<const std::int32_t> logit_rows;  // [S]
  std::vector<Table> tables;                 // one per KV group
};

// Logits [rows, columns], kept alive by `memory` even after a later step needed a larger buffer. A later step
// overwrites them.
struct Logits {
  std::shared_ptr<Mapping> memory;
  std::int64_t rows, columns;
  float* data() const { return reinterpret_cast<float*>(memory->data()); }
};

// What a forward took and had to do at least: every weight and every visible K and V read once per row of the batch,
// and two operations for each product and sum of matrices and attention.
struct Work {
  double seconds = 0;
  std::int64_t weight_bytes = 0, kv_bytes = 0, operations = 0;
};

class Program {
 public:
  using ValueId = std::int32_t;

  // The form in which a matrix wants its input: 8-bit blocks, bf16, or float32 as it is.
  enum class Form : std::uint8_t { kFloat, kQuantized, kBf16 };

  Program(const Kernels& kernels, std::shared_ptr<Weights> weights);

  // --- recording. Matrices and vectors are indices of Weights. All throw std::invalid_argument for arguments that do
  // not fit.
  ValueId embed(std::int32_t matrix);
  ValueId norm(ValueId x, std::int32_t weight, float eps);
  // x times the matrix, plus a bias unless that is -1. Linears of one input share its quantized or bf16 form.
  ValueId linear(ValueId x, std::int32_t matrix, std::int32_t bias);
  // cos and sin of the tokens' positions, times magnitude: [T, 2 * inverse_frequencies].
  ValueId angles(std::vector<double> inverse_frequencies, double magnitude);
  ValueId rope(ValueId x, ValueId angles, std::int32_t head_dim, bool interleaved);
  void kv_write(std::int32_t layer, std::int32_t num_kv_heads, ValueId k, ValueId v);
  // window: 0 for full attention.
  ValueId attention(std::int32_t layer, std::int32_t num_heads, std::int32_t num_kv_heads, float scale,
                    std::int32_t window, ValueId q);
  ValueId silu_mul(ValueId gate, ValueId up);
  ValueId add(ValueId a, ValueId b);
  // The rows of x [T, columns] whose logits are wanted: [S, columns].
  ValueId select(ValueId x);
  // Ends the recording; `logits` is a linear's result [S, vocab]. Without `fuse` every instruction stays in a phase of
  // its own kind: slower, for tests.
  void finish(ValueId logits, bool fuse = true);

  // --- replaying
  // Connects a cache that has every layer the program names, with the same heads. Replaces the one before.
  void bind(std::shared_ptr<KvStore> cache);
  // Computes a batch: writes its tokens' K and V, returns logits. Throws std::invalid_argument, before anything is
  // written, for a batch that does not fit program or cache. One thread at a time.
  Logits run(Pool& pool, const Batch& batch);

  // --- measuring
  // Of the last run.
  const Work& work() const { return work_; }
  // What runs between two barriers: names of the instructions, and the matrices of the linears among them.
  struct PhaseFacts {
    std::vector<std::string> ops;
    std::vector<std::int32_t> matrices;
  };
  std::vector<PhaseFacts> phase_facts() const;
  // From now on a run puts the seconds of its phases here, in order; null ends that. Borrowed.
  void time_phases(std::vector<double>* seconds) { phase_seconds_ = seconds; }

  std::int32_t num_instructions() const { return static_cast<std::int32_t>(instructions_.size()); }
  std::int64_t vocab() const { return logits_ < 0 ? 0 : values_[logits_].columns; }  // 0 before finish
  std::int32_t num_phases() const { return static_cast<std::int32_t>(phases_.size()); }
  const char* isa() const { return kernels_.name; }

 private:
  enum class Op : std::uint8_t {
    kEmbed,
    kNorm,
    kPrepare,
    kLinear,
    kAngles,
    kRope,
    kKvWrite,
    kAttention,
    kSiluMul,
    kAdd,
    kSelect
  };
  enum class Rows : std::uint8_t { kTokens, kLogits };

  struct Value {
    Rows rows;
    Form form;
    std::int64_t columns;
    std::int32_t slot = -1;      // of the scratch that all threads share
    std::int32_t own_tile = -1;  // made and read on one tile: index among such values of its phase
    std::int64_t own_row = -1;   // made before a phase and read only there: bytes per row before it, for threads that
                                 // make it for themselves
  };

  // Fields that an op does not name are unused. Weights are named by index: a program is recorded before they are
  // allocated.
  struct Instruction {
    Op op;
    ValueId out = -1;
    ValueId in[2] = {-1, -1};
    std::int32_t weight = -1;       // embed, linear: matrix; norm: vector
    std::int32_t bias = -1;         // linear: vector or -1
    float scalar = 0.0f;            // norm: epsilon; attention: scale
    std::int32_t index = 0;         // kv_write, attention: layer; angles: frequencies_
    std::int32_t num_heads = 0;     // attention
    std::int32_t num_kv_heads = 0;  // kv_write, attention
    std::int32_t head_dim = 0;      // rope, kv_write, attention
    std::int32_t window = 0;        // attention
    bool interleaved = false;       // rope
  };

  // Row phases cut rows into tiles and run all their instructions on one tile; panel phases cut the columns of
  // independent linears; attention phases cut tokens and KV heads.
  enum class Cut : std::uint8_t { kRows, kPanels, kAttention };
  struct Phase {
    Cut cut;
    Rows rows;
    std::vector<std::int32_t> before;  // row instructions on which the main ones depend
    std::vector<std::int32_t> main;    // in panel phases with an `after` all have the same number of columns
    std::int32_t pair = -1;            // of Weights, when the two main ones read a pair
    std::vector<std::int32_t> after;   // row instructions on the columns of a tile, once it has been computed
  };

  // One line of the fusion table: an instruction beside a phase of another cut may move into it.
  struct Fusion {
    Op op;
    Cut host;
    enum class Side : std::uint8_t { kBefore, kAfter } side;
  };
  static const Fusion kFusions[];

  // Scratch of a value needs per_token bytes for each of T, or per_logit for each of S.
  struct Slot {
    std::size_t per_token = 0, per_logit = 0;
    std::int32_t free_after = -1;  // last phase that reads its present value
    std::size_t offset = 0;        // for the present step
  };

  struct Frequencies {
    std::vector<double> inverse;
    float magnitude;
  };

  // The phase for which a thread has made its own rows.
  struct alignas(64) Fresh {
    std::int64_t phase = -1;
  };

  // Work of attention in layers that see alike.
  struct Seen {
    std::int32_t window;
    std::int64_t token_bytes;  // of K and V of one token
    std::int64_t operations;   // of one token and one that it sees
  };

  // Consecutive tokens of one row that attend together.
  struct QueryTile {
    std::int32_t row, begin, end;
  };

  // One split of the context of a query tile, where there are too few tiles for all threads.
  struct SplitTile {
    std::int32_t tile, split;
    // where its partial results begin in partials_: [kv_heads][tokens * heads per KV head][size]
    std::int64_t partials;
  };

  // What a step computes once: sizes, addresses and the row of each token.
  struct Step {
    const Batch& batch;
    std::int64_t num_tokens, num_logits;
    float* logits;
    std::int64_t rows(Rows of) const { return of == Rows::kTokens ? num_tokens : num_logits; }
  };

  // Where instructions run: columns [column, column + columns) of a value whose rows a thread makes or has made in its
  // own memory.
  struct Place {
    std::uint8_t* own_rows = nullptr;  // values with own_row; null: they are shared
    float* own_tile = nullptr;         // values with own_tile: [values, rows, width]
    std::int64_t rows = 0, width = 0;
    std::int64_t column = 0, columns = 0;  // of the tile; 0 columns: all
    bool interleaved = false;              // the first two values with own_tile lie in turn, 16 columns of each
  };

  ValueId new_value(Rows rows, std::int64_t columns, Form form = Form::kFloat);
  const Value& value(ValueId id, Form form = Form::kFloat) const;
  const Value& token_value(ValueId id) const;
  void emit(const Instruction& instruction);
  ValueId prepare(ValueId x, Form form);

  static Cut cut_of(Op op);
  static std::size_t columns_bytes(Form form, std::int64_t columns);
  static const char* name_of(Op op);
  static std::size_t row_bytes(const Value& value);
  void make_phases();
  void fuse();
  bool may_follow(const Instruction& instruction, const Phase& host, const std::vector<std::int32_t>& staying) const;
  bool may_precede(const Instruction& instruction, const Phase& host) const;
  bool made_in(ValueId id, const std::vector<std::int32_t>& instructions) const;
  bool reads(std::int32_t instruction, ValueId id) const;
  std::int32_t pair_of(const Phase& phase) const;
  void place_values();
  void assign_slots();

  void count_linears();
  void count_attention();
  Work work_of(const Step& step) const;

  void check(const Batch& batch) const;
  void lay_out(const Step& step, int threads);
  void cut_queries(const Batch& batch, std::int32_t tokens_per_tile);
  std::size_t own_rows_bytes(const Step& step, const Phase& phase) const;
  std::size_t own_tiles_bytes(const Step& step, const Phase& phase) const;
  std::int64_t own_tiles(const Phase& phase) const;
  std::int64_t tile_panels(const Step& step, const Phase& phase) const;
  std::uint8_t* address(const Step& step, const Place& place, ValueId id, std::int64_t index,
                        std::int64_t column) const;
  float* row(const Step& step, const Place& place, ValueId id, std::int64_t index) const;

  void run_phase(Pool& pool, const Step& step, const Phase& phase);
  void run_rows(Pool& pool, const Step& step, Rows rows, const std::vector<std::int32_t>& instructions);
  void run_panels(Pool& pool, const Step& step, const Phase& phase);
  void multiply(const Step& step, Place place, const Instruction& instruction, std::int64_t begin,
                std::int64_t end) const;
  void multiply_pair(const Step& step, const Place& place, const Phase& phase, std::int64_t begin,
                     std::int64_t end) const;
  void run_attention(Pool& pool, const Step& step, const Phase& phase);
  void run_split_attention(Pool& pool, const Step& step, const Instruction& instruction);
  AttendArgs attend_args(const Step& step, const Instruction& instruction, const QueryTile& queries,
                         std::int32_t kv_head) const;
  void run_tile(const Step& step, const Place& place, const std::vector<std::int32_t>& instructions, std::int64_t begin,
                std::int64_t end) const;
  void run_row(const Step& step, const Place& place, const Instruction& instruction, std::int64_t index) const;

  const Kernels& kernels_;
  std::shared_ptr<Weights> weights_;
  std::shared_ptr<KvStore> cache_;
  std::vector<Instruction> instructions_;
  std::vector<Value> values_;
  std::vector<Frequencies> frequencies_;
  std::vector<Phase> phases_;
  std::vector<Slot> slots_;
  ValueId logits_ = -1;
  std::int64_t vocab_ = INT64_MAX;  // smallest embedding table

  std::vector<double>* phase_seconds_ = nullptr;
  Work per_token_, per_logit_;  // of linears; bytes are of all tokens or logits together
  std::vector<Seen> seen_;
  Work work_;

  Mapping scratch_;
  // Each thread's own: rows of values with own_row, then tiles of values with own_tile.
  Mapping own_memory_;
  std::size_t own_bytes_ = 0;     // per thread
  std::vector<Fresh> fresh_;      // per thread
  std::int64_t phase_count_ = 0;  // of all steps
  std::shared_ptr<Mapping> logits_memory_;
  std::vector<std::int32_t> row_of_token_;
  std::vector<QueryTile> query_tiles_;
  std::int32_t query_tile_tokens_ = 0;
  std::vector<SplitTile> split_tiles_;
  std::vector<float> partials_;
};

}  // namespace octavo
