#include "core/weights.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

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

void Weights::reserve(std::size_t bytes) {
  if (allocated()) throw std::invalid_argument("weights are declared before they are allocated");
  bytes_ += round_up(bytes, 64);
}

std::int32_t Weights::declare_matrix(StoredFormat format, bool float32, std::int64_t n, std::int64_t k) {
  const PackedMatrix shape = describe_packed(format, float32, n, k);
  reserve(packed_bytes(shape));
  matrices_.push_back({shape, format});
  return static_cast<std::int32_t>(matrices_.size()) - 1;
}

std::int32_t Weights::declare_vector(std::int64_t n) {
  if (n < 1) throw std::invalid_argument("a vector needs at least one element, got " + std::to_string(n));
  reserve(static_cast<std::size_t>(n) * sizeof(float));
  vectors_.push_back({n});
  return static_cast<std::int32_t>(vectors_.size()) - 1;
}

std::int32_t Weights::interleave(std::int32_t first, std::int32_t second) {
  const Matrix &a = checked(matrices_, first, "matrix"), &b = checked(matrices_, second, "matrix");
  reserve(0);
  if (a.pair >= 0 || b.pair >= 0) {
    const bool same = a.pair == b.pair && pairs_[static_cast<std::size_t>(a.pair)].first == first;
    return same && first != second ? a.pair : -1;
  }
  const bool alike = a.shape.packing == b.shape.packing && a.shape.symmetric == b.shape.symmetric &&
                     a.shape.n == b.shape.n && a.shape.k == b.shape.k;
  if (!alike || first == second || a.shape.n % kPanel != 0) return -1;
  pairs_.push_back({first, second});
  const auto pair = static_cast<std::int32_t>(pairs_.size()) - 1;
  for (const std::int32_t index : {first, second}) {
    matrices_[static_cast<std::size_t>(index)].pair = pair;
    matrices_[static_cast<std::size_t>(index)].shape.panel_bytes *= 2;
  }
  return pair;
}

void Weights::allocate() {
  if (allocated()) throw std::invalid_argument("weights are allocated once");
  std::size_t end = 0;
  const auto take = [&end](std::size_t bytes) { return std::exchange(end, end + round_up(bytes, 64)); };
  for (Matrix& matrix : matrices_)
    if (matrix.pair < 0) matrix.offset = take(packed_bytes(matrix.shape));
  for (const Pair& pair : pairs_) {
    Matrix& first = matrices_[static_cast<std::size_t>(pair.first)];
    first.offset = take(packed_bytes(first.shape));
    matrices_[static_cast<std::size_t>(pair.second)].offset =
        first.offset + static_cast<std::size_t>(first.shape.panel_bytes / 2);
  }
  for (Vector& vector : vectors_) vector.offset = take(static_cast<std::size_t>(vector.n) * sizeof(float));
  mapping_ = Mapping(std::max<std::size_t>(1, end), Mapping::Pages::kHuge);
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

PackedMatrix Weights::placed(PackedMatrix shape, std::size_t offset) const {
  shape.data = allocated() ? mapping_.data() + offset : nullptr;
  return shape;
}

PackedMatrix Weights::matrix(std::int32_t index) const {
  const Matrix& matrix = checked(matrices_, index, "matrix");
  return placed(matrix.shape, matrix.offset);
}

PackedMatrix Weights::pair(std::int32_t index) const {
  const Matrix& first = checked(matrices_, checked(pairs_, index, "pair").first, "matrix");
  PackedMatrix both = first.shape;
  both.n *= 2;
  both.panel_bytes /= 2;
  return placed(both, first.offset);
}

std::int64_t Weights::matrix_bytes(std::int32_t index) const {
  const Matrix& matrix = checked(matrices_, index, "matrix");
  return static_cast<std::int64_t>(packed_bytes(matrix.shape)) / (matrix.pair < 0 ? 1 : 2);
}

std::span<const float> Weights::vector(std::int32_t index) const {
  const Vector& vector = checked(vectors_, index, "vector");
  return {allocated() ? reinterpret_cast<const float*>(mapping_.data() + vector.offset) : nullptr,
          static_cast<std::size_t>(vector.n)};
}

}  // namespace octavo
