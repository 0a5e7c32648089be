// Timed loops for octavo/bench/local/kernels.py. The GIL is released while they run.
#include "core/bench.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bindings/registry.h"
#include "core/dispatch.h"

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
      "bench_linears",
      [](Pool& pool, const std::string& isa, const Weights& weights,
         const std::vector<std::vector<std::int32_t>>& phases,
         std::int64_t rows) { return time_linears(pool, kernels_for(isa), weights, phases, rows); },
      "pool"_a, "isa"_a, "weights"_a, "phases"_a, "rows"_a, Release(), "Seconds of each phase of one pass.");
  m.def(
      "bench_fill_cache",
      [](Pool& pool, const std::string& isa, const KvStore& cache) { fill_cache(pool, kernels_for(isa), cache); },
      "pool"_a, "isa"_a, "cache"_a, Release(), "Writes all of a cache.");
  m.def(
      "bench_attention",
      [](Pool& pool, const std::string& isa, const KvStore& cache, std::int32_t rows, std::int32_t queries,
         std::int32_t context, std::int32_t num_heads, std::int32_t sets) {
        return time_attention(pool, kernels_for(isa), cache, {rows, queries, context, num_heads, sets});
      },
      "pool"_a, "isa"_a, "cache"_a, "rows"_a, "queries"_a, "context"_a, "num_heads"_a, "sets"_a, Release(),
      "Mean seconds of one layer's attention.");
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
