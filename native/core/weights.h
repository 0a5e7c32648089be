// Packed weights in one mapping. Declared first, so that a program can be recorded and refused before memory is taken;
// then allocated once; then filled. Knows formats and layouts, not files or what a weight means.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/memory.h"
#include "core/packing.h"
#include "core/pool.h"

namespace octavo {

class Weights {
 public:
  // Return the new matrix's or vector's index. Throw std::invalid_argument for sizes that do not fit the format, and
  // after allocate().
  std::int32_t declare_matrix(StoredFormat format, bool float32, std::int64_t n, std::int64_t k);
  std::int32_t declare_vector(std::int64_t n);

  // Stores two matrices panel by panel in turn, where they have the same packing and shape and end at a whole panel;
  // then `pair` has both as one matrix, with panel i of the first as panel 2 i. Returns the pair's index, again for a
  // pair that there is, or -1 where this cannot be. Throws std::invalid_argument after allocate().
  std::int32_t interleave(std::int32_t first, std::int32_t second);

  // Reserves memory for all that is declared, on huge pages where the system gives them. Throws std::bad_alloc.
  void allocate();
  bool allocated() const { return mapping_.data() != nullptr; }

  // Packs the stored bytes of a matrix, its panels shared between the pool's threads, or copies a vector. Throw
  // std::invalid_argument when there is not exactly what was declared.
  void fill_matrix(Pool& pool, std::int32_t index, std::span<const std::uint8_t> raw);
  void fill_vector(std::int32_t index, std::span<const float> values);

  // Without data before allocate(). Throw std::invalid_argument for an index that was not returned.
  PackedMatrix matrix(std::int32_t index) const;
  PackedMatrix pair(std::int32_t index) const;
  std::int64_t matrix_bytes(std::int32_t index) const;
  std::span<const float> vector(std::int32_t index) const;

  // Bytes of all that is declared.
  std::size_t bytes() const { return bytes_; }

 private:
  struct Matrix {
    PackedMatrix shape;
    StoredFormat format;
    std::int32_t pair = -1;
    std::size_t offset = 0;  // from allocate() on, as for vectors
  };
  struct Vector {
    std::int64_t n;
    std::size_t offset = 0;
  };
  struct Pair {
    std::int32_t first, second;
  };

  void reserve(std::size_t bytes);
  PackedMatrix placed(PackedMatrix shape, std::size_t offset) const;

  std::vector<Matrix> matrices_;
  std::vector<Vector> vectors_;
  std::vector<Pair> pairs_;
  std::size_t bytes_ = 0;
  Mapping mapping_;
};

}  // namespace octavo
