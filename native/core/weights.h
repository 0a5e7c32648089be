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

  // Reserves memory for all that is declared, on huge pages where the system gives them. Throws std::bad_alloc.
  void allocate();
  bool allocated() const { return mapping_.data() != nullptr; }

  // Packs the stored bytes of a matrix, its panels shared between the pool's threads, or copies a vector. Throw
  // std::invalid_argument when there is not exactly what was declared.
  void fill_matrix(Pool& pool, std::int32_t index, std::span<const std::uint8_t> raw);
  void fill_vector(std::int32_t index, std::span<const float> values);

  // Without data before allocate(). Throw std::invalid_argument for an index that was not returned.
  PackedMatrix matrix(std::int32_t index) const;
  std::span<const float> vector(std::int32_t index) const;

  // Bytes of all that is declared.
  std::size_t bytes() const { return bytes_; }

 private:
  struct Matrix {
    PackedMatrix shape;
    StoredFormat format;
    std::size_t offset;
  };
  struct Vector {
    std::int64_t n;
    std::size_t offset;
  };

  std::size_t reserve(std::size_t bytes);

  std::vector<Matrix> matrices_;
  std::vector<Vector> vectors_;
  std::size_t bytes_ = 0;
  Mapping mapping_;
};

}  // namespace octavo
