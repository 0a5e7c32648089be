#include "core/weights.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

template <typename Item>
const Item& checked(const std::vector<Item>& items, std::int32_t index, const char* what) {
  if (index < 0 || static_cast<std::size_t>(index) >= items.size())
    throw std::invalid_argument("no " + std::string(what) + " " + std::to_string(index));
  return items[index];
}

void require_count(std::size_t got, std::size_t expected, const char* what) {
  if (got != expected)
    throw std::invalid_argument("expected " + std::to_string(expected) + " " + what + ", got " + std::to_string(got));
}

}  // namespace

std::size_t Weights::reserve(std::size_t bytes) {
  if (allocated()) throw std::invalid_argument("weights are declared before they are allocated");
  const std::size_t offset = bytes_;
  bytes_ += round_up(bytes, 64);
  return offset;
}

std::int32_t Weights::declare_matrix(StoredFormat format, bool float32, std::int64_t n, std::int64_t k) {
  const PackedMatrix shape = describe_packed(format, float32, n, k);
  matrices_.push_back({shape, format, reserve(packed_bytes(shape))});
  return static_cast<std::int32_t>(matrices_.size()) - 1;
}

std::int32_t Weights::declare_vector(std::int64_t n) {
  if (n < 1) throw std::invalid_argument("a vector needs at least one element, got " + std::to_string(n));
  vectors_.push_back({n, reserve(static_cast<std::size_t>(n) * sizeof(float))});
  return static_cast<std::int32_t>(vectors_.size()) - 1;
}

void Weights::allocate() {
  if (allocated()) throw std::invalid_argument("weights are allocated once");
  mapping_ = Mapping(std::max<std::size_t>(1, bytes_), Mapping::Pages::kHuge);
}

void Weights::fill_matrix(Pool& pool, std::int32_t index, std::span<const std::uint8_t> raw) {
  const Matrix& matrix = checked(matrices_, index, "matrix");
  if (!allocated()) throw std::invalid_argument("weights are allocated before they are filled");
  const std::int64_t row_bytes = stored_row_bytes(matrix.format, matrix.shape.k);
  require_count(raw.size(), static_cast<std::size_t>(matrix.shape.n * row_bytes), "bytes of a matrix");
  std::uint8_t* data = mapping_.data() + matrix.offset;
  const std::int64_t panels = num_panels(matrix.shape);
  const std::int64_t grain = std::max<std::int64_t>(1, panels / (8 * pool.threads()));
  pool.parallel_for(static_cast<std::int32_t>((panels + grain - 1) / grain), [&](std::int32_t tile) {
    pack_panels(matrix.shape, matrix.format, raw.data(), tile * grain, std::min(panels, (tile + 1) * grain), data);
  });
}

void Weights::fill_vector(std::int32_t index, std::span<const float> values) {
  const Vector& vector = checked(vectors_, index, "vector");
  if (!allocated()) throw std::invalid_argument("weights are allocated before they are filled");
  require_count(values.size(), static_cast<std::size_t>(vector.n), "elements of a vector");
  std::copy(values.begin(), values.end(), reinterpret_cast<float*>(mapping_.data() + vector.offset));
}

PackedMatrix Weights::matrix(std::int32_t index) const {
  const Matrix& matrix = checked(matrices_, index, "matrix");
  PackedMatrix packed = matrix.shape;
  packed.data = allocated() ? mapping_.data() + matrix.offset : nullptr;
  return packed;
}

std::span<const float> Weights::vector(std::int32_t index) const {
  const Vector& vector = checked(vectors_, index, "vector");
  return {allocated() ? reinterpret_cast<const float*>(mapping_.data() + vector.offset) : nullptr,
          static_cast<std::size_t>(vector.n)};
}

}  // namespace octavo
