// Timed loops for octavo/bench/local/kernels.py. The GIL is released while they run.
#include "core/bench.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/registry.h"
#include "core/dispatch.h"
#include "core/program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

Peak peak_of(const std::string& name) {
  if (name == "int8") return Peak::kInt8;
  if (name == "bf16") return Peak::kBf16;
  if (name == "f32") return Peak::kF32;
  throw std::invalid_argument("no peak is named " + name + "; there are int8, bf16 and f32");
}

using Vector = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::span<const std::int32_t> span_of(const Vector& array) { return {array.data(), array.shape(0)}; }

std::vector<double> time_phases(Program& program, Pool& pool, const Vector& tokens, const Vector& positions,
                                const Vector& row_starts, const Table& table, const Vector& logit_rows) {
  if (table.shape(0) + 1 != row_starts.shape(0)) throw std::invalid_argument("a block table needs one line per row");
  const Batch batch{span_of(tokens),
                    span_of(positions),
                    span_of(row_starts),
                    span_of(logit_rows),
                    {{table.data(), static_cast<std::int64_t>(table.shape(1))}}};
  const nb::gil_scoped_release release;
  std::vector<double> seconds;
  program.time_phases(&seconds);
  try {
    program.run(pool, batch);
  } catch (...) {
    program.time_phases(nullptr);
    throw;
  }
  program.time_phases(nullptr);
  return seconds;
}

}  // namespace

void register_bench(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.def("bench_dispatch", &time_dispatch, "pool"_a, "loops"_a, Release(), "Mean seconds of an empty loop.");
  m.def("bench_wake", &time_wake, "pool"_a, "idle_s"_a, Release(), "Seconds of an empty loop after a pause.");
  m.def(
      "bench_peak",
      [](Pool& pool, const std::string& kind, std::int64_t loops) { return measure_peak(pool, peak_of(kind), loops); },
      "pool"_a, "kind"_a, "loops"_a, Release(),
      "Operations per second at most, of kind int8, bf16 or f32; 0 for none.");
  m.def(
      "bench_phase_facts",
      [](const Program& program) {
        std::vector<std::pair<std::vector<std::string>, std::vector<std::int32_t>>> facts;
        for (Program::PhaseFacts& phase : program.phase_facts())
          facts.emplace_back(std::move(phase.ops), std::move(phase.matrices));
        return facts;
      },
      "program"_a, "(names of its instructions, matrices of its linears) of each phase of a program.");
  m.def("bench_phases", &time_phases, "program"_a, "pool"_a, "tokens"_a.noconvert(), "positions"_a.noconvert(),
        "row_starts"_a.noconvert(), "table"_a.noconvert(), "logit_rows"_a.noconvert(),
        "Seconds of each phase of a step of a program whose cache has one group.");
  m.def(
      "bench_fill_cache",
      [](Pool& pool, const std::string& isa, const KvStore& cache) { fill_cache(pool, kernels_for(isa), cache); },
      "pool"_a, "isa"_a, "cache"_a, Release(), "Writes all of a cache.");
  m.def(
      "bench_row_op",
      [](const std::string& isa, const std::string& name, std::int64_t columns, std::int64_t head_dim,
         std::int64_t repeats) { return time_row_op(kernels_for(isa), name, columns, head_dim, repeats); },
      "isa"_a, "name"_a, "columns"_a, "head_dim"_a, "repeats"_a, Release(), "Mean seconds of a row operation.");

  nb::class_<ReadBuffer>(m, "ReadBuffer", "Memory to read.")
      .def(nb::init<std::size_t, bool>(), "bytes"_a, "huge_pages"_a)
      .def_prop_ro("bytes", &ReadBuffer::bytes)
      .def("time_read", &ReadBuffer::time_read, "pool"_a, "tile_bytes"_a, "repeats"_a, "streams"_a, Release(),
           "Seconds to read all of it, tile by tile.");
}

}  // namespace octavo
