// Timed loops for `octavo bench kernels`: what the machine gives at most, and what single operations make of it.
//
// All of them run on a Pool, because what the engine's threads can reach is what counts. Linears, attention and whole
// steps are timed where they run, in the phases of a Program. Times are seconds of a monotonic clock. Knows nothing of
// models, rounds or reports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/kv_store.h"
#include "core/memory.h"
#include "core/pool.h"
#include "kernels/kernels.h"

namespace octavo {

// --- ceilings

// Mean time of a loop in which all threads take part and do nothing else: what a barrier of the engine costs.
double time_dispatch(Pool& pool, std::int64_t loops);

// Time of one such loop when there was none for `idle_s`, so that the helpers may be asleep.
double time_wake(Pool& pool, double idle_s);

// Memory filled with nonzero bytes.
class ReadBuffer {
 public:
  // Throws std::invalid_argument for no bytes, std::bad_alloc.
  ReadBuffer(std::size_t bytes, bool huge_pages);

  std::size_t bytes() const { return bytes_; }

  // Time to read all of it: the threads claim tiles of tile_bytes and read each `repeats` times in a row. A tile is
  // read as `streams` sequences side by side. Throws std::invalid_argument unless tile_bytes is a multiple of 64 *
  // streams that divides bytes().
  double time_read(Pool& pool, std::size_t tile_bytes, std::int64_t repeats, int streams) const;

 private:
  std::size_t bytes_;
  Mapping memory_;
};

enum class Peak : std::uint8_t { kInt8, kBf16, kF32 };

// Operations per second of all threads in a loop of independent multiply-adds (two operations each), by the fastest
// instructions of this CPU that octavo has kernels for; 0 when it has none of that kind.
double measure_peak(Pool& pool, Peak peak, std::int64_t loops);

// --- operations

// Writes K and V to all blocks of a cache, so that its pages exist.
void fill_cache(Pool& pool, const Kernels& kernels, const KvStore& cache);

// Mean time of a row operation on one row of `columns` elements, on the calling thread, data in cache.
// name: rms_norm, quantize, to_bf16, add, silu_mul, or rope over heads of head_dim. Throws std::invalid_argument.
double time_row_op(const Kernels& kernels, const std::string& name, std::int64_t columns, std::int64_t head_dim,
                   std::int64_t repeats);

}  // namespace octavo
