#include "core/memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace octavo {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kLargest = std::size_t{1}
                                 << 46;  // half of a user address space: keeps the sums below from wrapping

}  // namespace

Mapping::Mapping(std::size_t bytes, Pages pages) {
  if (bytes == 0) return;
  if (bytes > kLargest) throw std::bad_alloc();
  const std::size_t size = round_up(bytes, kHugePage);
  // One huge page more than needed, of which the ends around the aligned part are given back.
  void* mapped =
      mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* start = static_cast<std::uint8_t*>(mapped);
  const std::size_t before =
      round_up(reinterpret_cast<std::uintptr_t>(start), kHugePage) - reinterpret_cast<std::uintptr_t>(start);
  if (before > 0) munmap(start, before);
  if (before < kHugePage) munmap(start + before + size, kHugePage - before);
  data_ = start + before;
  size_ = size;
  madvise(data_, size_, pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, size_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace octavo
