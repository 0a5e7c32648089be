// Bindings of instruction sets, the thread pool, weights, the KV cache and recorded programs. Every array that crosses
// is checked here or in the core before it is read; what cannot be is refused with ValueError or TypeError.
#include "core/program.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/registry.h"
#include "core/decode.h"
#include "core/dispatch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> span_of(const Vector<T>& array) {
  return {array.data(), array.shape(0)};
}

const Kernels& choose(const std::optional<std::string>& isa) { return isa ? kernels_for(*isa) : default_kernels(); }

// layers, num_blocks, num_kv_heads, head_dim, window (0: none)
using Group = std::tuple<std::vector<std::int32_t>, std::int32_t, std::int32_t, std::int32_t, std::int32_t>;

KvFormat kv_format(const std::string& name) {
  if (name == "float32") return KvFormat::kF32;
  if (name == "bfloat16") return KvFormat::kBF16;
  if (name == "int8") return KvFormat::kI8;
  throw std::invalid_argument("no KV cache format " + name + "; there are float32, bfloat16 and int8");
}

std::shared_ptr<KvStore> make_cache(const std::string& format, std::int32_t block_size,
                                    const std::vector<Group>& groups) {
  std::vector<KvGroup> parts;
  for (const auto& [layers, num_blocks, num_kv_heads, head_dim, window] : groups)
    parts.push_back({layers, num_blocks, num_kv_heads, head_dim, window});
  return std::make_shared<KvStore>(kv_format(format), block_size, std::move(parts));
}

using BlockBytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<2>, nb::c_contig>;

BlockBytes read_blocks(const KvStore& cache, std::int32_t group, const Vector<std::int32_t>& blocks) {
  const std::size_t block_bytes = cache.block_bytes(group);
  auto memory = std::make_unique<std::uint8_t[]>(blocks.shape(0) * block_bytes);
  {
    const nb::gil_scoped_release release;
    cache.read(group, span_of(blocks), {memory.get(), blocks.shape(0) * block_bytes});
  }
  std::uint8_t* data = memory.release();
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<std::uint8_t*>(p); });
  return BlockBytes(data, {blocks.shape(0), block_bytes}, owner);
}

void write_blocks(KvStore& cache, std::int32_t group, const Vector<std::int32_t>& blocks,
                  const nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& bytes) {
  const nb::gil_scoped_release release;
  cache.write(group, span_of(blocks), {bytes.data(), bytes.shape(0) * bytes.shape(1)});
}

void copy_blocks(KvStore& cache, std::int32_t group, const Vector<std::int32_t>& sources,
                 const Vector<std::int32_t>& targets) {
  const nb::gil_scoped_release release;
  cache.copy(group, span_of(sources), span_of(targets));
}

using LogitsArray = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;

Batch batch_of(const Vector<std::int32_t>& tokens, const Vector<std::int32_t>& positions,
               const Vector<std::int32_t>& row_starts, const std::vector<Table>& tables,
               const Vector<std::int32_t>& logit_rows) {
  Batch batch{span_of(tokens), span_of(positions), span_of(row_starts), span_of(logit_rows), {}};
  for (const Table& table : tables) {
    if (table.shape(0) + 1 != row_starts.shape(0)) throw std::invalid_argument("a block table needs one line per row");
    batch.tables.push_back({table.data(), static_cast<std::int64_t>(table.shape(1))});
  }
  return batch;
}

std::tuple<double, std::int64_t, std::int64_t, std::int64_t> to_tuple(const Work& work) {
  return {work.seconds, work.weight_bytes, work.kv_bytes, work.operations};
}

auto decode_rows(Program& program, Pool& pool, Sampler& sampler, const Vector<std::int32_t>& tokens,
                 const Vector<std::int32_t>& positions, const Vector<std::int32_t>& row_starts,
                 const std::vector<Table>& tables, const Vector<std::int32_t>& logit_rows,
                 const Vector<std::int32_t>& slots, std::int64_t max_steps) {
  const Batch batch = batch_of(tokens, positions, row_starts, tables, logit_rows);
  Decoded decoded;
  {
    const nb::gil_scoped_release release;
    decoded = decode(program, pool, sampler, batch, span_of(slots), max_steps);
  }
  std::vector<int> status;
  for (const RowStatus s : decoded.status) status.push_back(static_cast<int>(s));
  return std::make_tuple(std::move(decoded.tokens), std::move(status), to_tuple(decoded.work));
}

LogitsArray run(Program& program, Pool& pool, const Vector<std::int32_t>& tokens, const Vector<std::int32_t>& positions,
                const Vector<std::int32_t>& row_starts, const std::vector<Table>& tables,
                const Vector<std::int32_t>& logit_rows) {
  const Batch batch = batch_of(tokens, positions, row_starts, tables, logit_rows);
  Logits logits;
  {
    const nb::gil_scoped_release release;
    logits = program.run(pool, batch);
  }
  auto* keep = new std::shared_ptr<Mapping>(logits.memory);
  const nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<Mapping>*>(p); });
  return LogitsArray(logits.data(), {static_cast<std::size_t>(logits.rows), static_cast<std::size_t>(logits.columns)},
                     owner);
}

}  // namespace

void register_program(nb::module_& m) {
  m.def("available_isas", &available_isas, "Instruction sets that this build has and this CPU runs, slowest first.");
  m.def(
      "isa", [] { return std::string(default_kernels().name); },
      "The instruction set in use: OCTAVO_ISA, or the fastest available. Raises ValueError when OCTAVO_ISA cannot run "
      "here.");

  nb::class_<Pool>(m, "Pool", "Threads that share the loops of a program: the caller and threads - 1 helpers.")
      .def(nb::init<int>(), "threads"_a)
      .def_prop_ro("threads", &Pool::threads);

  nb::class_<Weights>(m, "Weights", "Packed weights: declared, then allocated, then filled.")
      .def(nb::init<>())
      .def(
          "declare_matrix",
          [](Weights& weights, const std::string& format, bool float32, std::int64_t n, std::int64_t k) {
            return weights.declare_matrix(stored_format(format), float32, n, k);
          },
          "format"_a, "float32"_a, "n"_a, "k"_a, "Declares a stored [n, k] matrix and returns its index.")
      .def("declare_vector", &Weights::declare_vector, "n"_a, "Declares a float32 vector and returns its index.")
      .def("allocate", &Weights::allocate, "Reserves memory for all that is declared.")
      .def(
          "fill_matrix",
          [](Weights& weights, Pool& pool, std::int32_t index, const Vector<std::uint8_t>& raw) {
            const nb::gil_scoped_release release;
            weights.fill_matrix(pool, index, span_of(raw));
          },
          "pool"_a, "index"_a, nb::arg("raw").noconvert(), "Packs a matrix's stored bytes.")
      .def(
          "fill_vector",
          [](Weights& weights, std::int32_t index, const Vector<float>& values) {
            weights.fill_vector(index, span_of(values));
          },
          "index"_a, nb::arg("values").noconvert(), "Copies a vector.")
      .def_prop_ro("bytes", &Weights::bytes);

  nb::class_<KvStore>(m, "KvStore", "The KV cache of all layers; pages are committed on first write.")
      .def(nb::new_(&make_cache), "format"_a, "block_size"_a, "groups"_a,
           "Format float32, bfloat16 or int8; groups are (layers, num_blocks, num_kv_heads, head_dim, window or 0).")
      .def_prop_ro("reserved_bytes", &KvStore::reserved_bytes)
      .def("copy_blocks", &copy_blocks, "group"_a, nb::arg("sources").noconvert(), nb::arg("targets").noconvert(),
           "Copies blocks of a group, one after the other.")
      .def("read_blocks", &read_blocks, "group"_a, nb::arg("blocks").noconvert(),
           "The bytes [n, bytes of a block] of blocks, all layers of the group together.")
      .def("write_blocks", &write_blocks, "group"_a, nb::arg("blocks").noconvert(), nb::arg("bytes").noconvert(),
           "Puts back what read_blocks gave.");

  nb::class_<Program>(m, "Program", "A recorded forward. Recording methods return value ids.")
      .def(
          "__init__",
          [](Program* self, std::shared_ptr<Weights> weights, const std::optional<std::string>& isa) {
            new (self) Program(choose(isa), std::move(weights));
          },
          "weights"_a, "isa"_a = nb::none())
      .def("embed", &Program::embed, "matrix"_a)
      .def("norm", &Program::norm, "x"_a, "weight"_a, "eps"_a)
      .def("linear", &Program::linear, "x"_a, "matrix"_a, "bias"_a)
      .def("angles", &Program::angles, "inverse_frequencies"_a, "magnitude"_a)
      .def("rope", &Program::rope, "x"_a, "angles"_a, "head_dim"_a, "interleaved"_a)
      .def("kv_write", &Program::kv_write, "layer"_a, "num_kv_heads"_a, "k"_a, "v"_a)
      .def("attention", &Program::attention, "layer"_a, "num_heads"_a, "num_kv_heads"_a, "scale"_a, "window"_a, "q"_a)
      .def("silu_mul", &Program::silu_mul, "gate"_a, "up"_a)
      .def("add", &Program::add, "a"_a, "b"_a)
      .def("select", &Program::select, "x"_a)
      .def("finish", &Program::finish, "logits"_a, nb::kw_only(), "fuse"_a = true)
      .def("bind", &Program::bind, "cache"_a)
      .def("run", &run, "pool"_a, nb::arg("tokens").noconvert(), nb::arg("positions").noconvert(),
           nb::arg("row_starts").noconvert(), nb::arg("tables").noconvert(), nb::arg("logit_rows").noconvert(),
           "Computes a batch and returns logits [S, vocab], which the next run overwrites.")
      .def("decode", &decode_rows, "pool"_a, "sampler"_a, nb::arg("tokens").noconvert(),
           nb::arg("positions").noconvert(), nb::arg("row_starts").noconvert(), nb::arg("tables").noconvert(),
           nb::arg("logit_rows").noconvert(), nb::arg("slots").noconvert(), "max_steps"_a,
           "Steps of decoding until one in which a row ends or fails: (tokens [steps * rows], statuses of the last "
           "step, work of all).")
      .def_prop_ro(
          "work", [](const Program& program) { return to_tuple(program.work()); },
          "Of the last run: seconds, weight bytes and KV bytes it had to read, operations.")
      .def_prop_ro("num_instructions", &Program::num_instructions)
      .def_prop_ro("vocab", &Program::vocab)
      .def_prop_ro("num_phases", &Program::num_phases)
      .def_prop_ro("isa", [](const Program& program) { return std::string(program.isa()); });
}

}  // namespace octavo
