// Memory that the core maps itself: weights on huge pages, the KV cache committed on first write, scratch that grows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// Rounds up to a multiple of `step`, a power of two.
constexpr std::size_t round_up(std::size_t value, std::size_t step) { return (value + step - 1) & ~(step - 1); }

// Anonymous memory, zero filled by the system, aligned to 2 MiB, given back on destruction. Pages are committed on
// first write. Throws std::bad_alloc when the address space cannot be reserved.
class Mapping {
 public:
  // Huge pages are a wish: where the system refuses, ordinary pages serve, silently.
  enum class Pages { kOrdinary, kHuge };

  Mapping() = default;
  Mapping(std::size_t bytes, Pages pages);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace octavo
