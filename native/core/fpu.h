// The floating-point state that kernels run in.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

namespace octavo {

// While alive, this thread rounds to nearest, raises no traps and treats denormals as zero, in and out, as vdpbf16ps
// does anyway. Restores the state it found: the caller's thread belongs to Python.
class KernelFpu {
 public:
  KernelFpu(const KernelFpu&) = delete;
  KernelFpu& operator=(const KernelFpu&) = delete;

#if defined(__x86_64__)
  KernelFpu() : saved_(_mm_getcsr()) { _mm_setcsr(kMaskAllTraps | kFlushToZero | kDenormalsAreZero); }
  ~KernelFpu() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kMaskAllTraps = 0x1f80, kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  unsigned saved_;
#elif defined(__aarch64__)
  KernelFpu() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{1} << 24));
  }
  ~KernelFpu() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  std::uint64_t saved_;
#else
#error "octavo's kernels need a way to flush denormals on this processor"
#endif
};

}  // namespace octavo
