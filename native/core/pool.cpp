#include "core/pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/fpu.h"

namespace octavo {
namespace {

// Longer than the gaps between the loops of a step, shorter than anything a user or a neighbour process would notice.
constexpr auto kSpin = std::chrono::microseconds(50);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Word>
void futex_wait(std::atomic<Word>& word, Word while_equal) {
  static_assert(sizeof(std::atomic<Word>) == 4);
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, while_equal, nullptr, nullptr, 0);
}

template <typename Word>
void futex_wake(std::atomic<Word>& word, int threads) {
  static_assert(sizeof(std::atomic<Word>) == 4);
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
}

// Spins until ready() or until kSpin has passed; says which. The clock is read only now and then.
template <typename Ready>
bool spin_until(const Ready& ready) {
  for (int i = 0; i < 64; ++i) {
    if (ready()) return true;
    pause();
  }
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

}  // namespace

Pool::Pool(int threads) : owner_(getpid()) {
  if (threads < 1 || threads > 1024)
    throw std::invalid_argument("threads must be in 1..1024, got " + std::to_string(threads));
  // Signals are for the threads of the embedding program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    helpers_.reserve(static_cast<std::size_t>(threads - 1));
    for (int i = 1; i < threads; ++i) {
      helpers_.emplace_back([this] { help(); });
      pthread_setname_np(helpers_.back().native_handle(), ("octavo-" + std::to_string(i)).c_str());
    }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    stop();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stopping_.store(true);
  generation_.fetch_add(1);
  futex_wake(generation_, INT_MAX);
  if (getpid() == owner_) {
    for (std::thread& helper : helpers_) helper.join();
  } else {
    // The threads live in the parent process only: they can be neither joined nor detached, so their handles are left
    // behind.
    new std::vector<std::thread>(std::move(helpers_));
  }
  helpers_.clear();
}

void Pool::run(const Job& job) {
  job_ = job;
  finished_.store(0, std::memory_order_relaxed);
  unclaimed_.store(job.tiles, std::memory_order_release);
  // Sequentially consistent, paired with help(): either the helper sees the new generation or we see that it sleeps.
  generation_.fetch_add(1);
  if (sleepers_.load() > 0) futex_wake(generation_, job.tiles - 1);
  claim_tiles();
  const auto done = [&] { return finished_.load(std::memory_order_acquire) == job.tiles; };
  if (!spin_until(done)) {
    caller_sleeps_.store(true);
    for (;;) {
      const std::int32_t finished = finished_.load();
      if (finished == job.tiles) break;
      futex_wait(finished_, finished);
    }
    caller_sleeps_.store(false, std::memory_order_relaxed);
  }
  std::exception_ptr error;
  {
    const std::lock_guard lock(error_mutex_);
    error = std::exchange(error_, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

void Pool::claim_tiles() {
  std::int32_t unclaimed = unclaimed_.load(std::memory_order_relaxed);
  while (unclaimed > 0) {
    // Acquire: the job was published by the store that these decrements continue, so it may be read only after a claim.
    if (!unclaimed_.compare_exchange_weak(unclaimed, unclaimed - 1, std::memory_order_acquire,
                                          std::memory_order_relaxed))
      continue;
    try {
      job_.call(job_.context, job_.tiles - unclaimed);
    } catch (...) {
      const std::lock_guard lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
    finished_.fetch_add(1);  // after this the job may change
    if (caller_sleeps_.load()) futex_wake(finished_, 1);
    unclaimed = unclaimed_.load(std::memory_order_relaxed);
  }
}

void Pool::help() {
  const KernelFpu fpu;
  std::uint32_t seen = 0;
  while (true) {
    const auto changed = [&] { return generation_.load(std::memory_order_acquire) != seen; };
    if (!spin_until(changed)) {
      sleepers_.fetch_add(1);
      while (generation_.load() == seen) futex_wait(generation_, seen);
      sleepers_.fetch_sub(1);
    }
    if (stopping_.load(std::memory_order_acquire)) return;
    seen = generation_.load(std::memory_order_acquire);
    claim_tiles();
  }
}

}  // namespace octavo
