#include "core/pool.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/fpu.h"

namespace octavo {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// A helper spins for the usual gap between two steps, then sleeps. It does not yield its core while it waits: that is
// paid for with time slices that it then lacks in the middle of a tile. The caller sleeps too, which lets the system
// move a helper that has lost its core to this one.
constexpr auto kHelperSpin = microseconds(150);
constexpr auto kCallerSpin = microseconds(50);

// A wait that no tile explains: a thread's last tile is a small part of its share.
constexpr auto kLeastStall = microseconds(100);
constexpr int kLeastShareOfStall = 4;
// Helpers gain about a third of the time, so a quarter of it may be lost.
constexpr int kBearable = 3;
constexpr int kFirstMultiple = 4;
constexpr int kMostMultiple = 128;
constexpr auto kLongestAlone = milliseconds(500);
constexpr auto kLongestLoop = milliseconds(10);  // from one start to the next; what is longer was idle
constexpr auto kDelayWindow = milliseconds(8);   // of shared loops: longer than a time slice

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

// What a thread does first when it waits: about a microsecond of spinning.
template <typename Ready>
bool spin_briefly(const Ready& ready) {
  for (int i = 0; i < 64; ++i) {
    if (ready()) return true;
    pause();
  }
  return false;
}

// Spins until ready() or until `time` has passed; says which. The clock is read only now and then.
template <typename Ready>
bool spin_until(const Ready& ready, Contention::Clock::duration time) {
  const auto deadline = Contention::Clock::now() + time;
  do {
    if (spin_briefly(ready)) return true;
  } while (Contention::Clock::now() < deadline);
  return false;
}

// A generation and two numbers of 16 bits in one word.
constexpr std::uint64_t pack(std::uint32_t generation, std::uint32_t upper, std::uint32_t lower) {
  return std::uint64_t{generation} << 32 | upper << 16 | lower;
}
constexpr std::uint32_t generation_of(std::uint64_t word) { return static_cast<std::uint32_t>(word >> 32); }
constexpr std::uint32_t upper_of(std::uint64_t word) { return static_cast<std::uint32_t>(word) >> 16; }
constexpr std::uint32_t lower_of(std::uint64_t word) { return static_cast<std::uint32_t>(word) & 0xffff; }

}  // namespace

bool Contention::alone(Clock::time_point now) {
  const Clock::duration since = now - std::exchange(last_start_, now);
  if (now < alone_until_) {
    delay_known_ = false;
    return true;
  }
  if (since < kLongestLoop) {
    undisturbed_ += since;
    shared_ += since;
  }
  return false;
}

void Contention::waited(Clock::duration worked, Clock::duration waited, Clock::time_point now) {
  if (waited >= kLeastStall + worked / kLeastShareOfStall) lost(waited, undisturbed_ + worked, now);
}

bool Contention::due() const { return !delay_known_ || shared_ >= kDelayWindow; }

void Contention::delayed(Clock::duration total, Clock::time_point now) {
  const Clock::duration delay = total - std::exchange(delay_, total);
  const Clock::duration shared = std::exchange(shared_, Clock::duration{});
  if (std::exchange(delay_known_, true) && delay * kBearable >= shared) lost(delay, shared, now);
}

void Contention::lost(Clock::duration time, Clock::duration gained, Clock::time_point now) {
  undisturbed_ = {};
  multiple_ = gained >= kBearable * time ? 0 : std::clamp(2 * multiple_, kFirstMultiple, kMostMultiple);
  alone_until_ = now + std::min<Clock::duration>(multiple_ * time, kLongestAlone);
}

RunDelay::~RunDelay() {
  if (file_ >= 0) close(file_);
}

std::chrono::nanoseconds RunDelay::read() {
  const auto thread = static_cast<pid_t>(syscall(SYS_gettid));
  if (thread != thread_) {
    if (file_ >= 0) close(file_);
    file_ = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    thread_ = thread;
  }
  char text[64];
  const ssize_t size = file_ < 0 ? 0 : pread(file_, text, sizeof text - 1, 0);
  text[std::max<ssize_t>(size, 0)] = '\0';
  const char* second = std::strchr(text, ' ');  // after the time on a core
  return std::chrono::nanoseconds(second == nullptr ? 0 : std::strtoll(second, nullptr, 10));
}

Pool::Pool(int threads) : owner_(getpid()) {
  if (threads < 1 || threads > 1024)
    throw std::invalid_argument("threads must be in 1..1024, got " + std::to_string(threads));
  ranges_ = std::make_unique<Range[]>(static_cast<std::size_t>(threads));
  // Signals are for the threads of the embedding program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    helpers_.reserve(static_cast<std::size_t>(threads - 1));
    for (int i = 1; i < threads; ++i) {
      helpers_.emplace_back([this, i] { help(i); });
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
  published_.fetch_add(std::uint64_t{1} << 32);
  wakes_.fetch_add(1);
  futex_wake(wakes_, INT_MAX);
  if (getpid() == owner_) {
    for (std::thread& helper : helpers_) helper.join();
  } else {
    // The threads live in the parent process only: they can be neither joined nor detached, so their handles are left
    // behind.
    new std::vector<std::thread>(std::move(helpers_));
  }
  helpers_.clear();
}

void Pool::run(Call call, const void* context, std::int32_t tiles, Claim claim) {
  for (std::int32_t first = 0; first < tiles; first += kMostTiles) {
    const Job job{call, context, first, std::min(kMostTiles, tiles - first), claim};
    if (job.tiles > 1 && !helpers_.empty()) {
      const auto now = Contention::Clock::now();
      const bool alone = contention_.alone(now);
      if (claim == Claim::kOwn || !alone) {
        if (!alone && contention_.due()) contention_.delayed(run_delay_.read(), now);
        share(job, now);
        continue;
      }
    }
    compute(job, {0, job.tiles}, 0);
  }
  rethrow();
}

void Pool::share(const Job& job, Contention::Clock::time_point started) {
  job_ = job;
  const auto generation = generation_of(published_.load(std::memory_order_relaxed)) + 1;
  const std::uint64_t published =
      pack(generation, static_cast<std::uint32_t>(job.claim), static_cast<std::uint32_t>(job.tiles));
  // Sequentially consistent, paired with sleep_while(): either a helper sees the job or we see that it sleeps.
  published_.store(published);
  if (helpers_sleep_.load()) {
    helpers_sleep_.store(false);
    wakes_.fetch_add(1);
    futex_wake(wakes_, INT_MAX);
  }
  const std::int32_t mine = work(published, 0);
  expected_ += static_cast<std::uint32_t>(job.tiles - mine);
  if (!spin_briefly([&] { return finished_.load(std::memory_order_acquire) == expected_; })) {
    const auto worked_until = Contention::Clock::now();
    wait();
    const auto now = Contention::Clock::now();
    contention_.waited(worked_until - started, now - worked_until, now);
  }
}

void Pool::wait() {
  if (spin_until([&] { return finished_.load(std::memory_order_acquire) == expected_; }, kCallerSpin)) return;
  caller_sleeps_.store(true);
  for (;;) {
    const std::uint32_t finished = finished_.load();
    if (finished == expected_) break;
    futex_wait(finished_, finished);
  }
  caller_sleeps_.store(false, std::memory_order_relaxed);
}

void Pool::rethrow() {
  const std::lock_guard lock(error_mutex_);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

// Tiles of the owner's range, or none when none are left. What a claim returns belongs to the published job, which
// cannot end before they have been computed: when it has ended, words of its generation and of later ones hold no tile
// of it, and words of earlier ones stand for empty ranges.
Pool::Tiles Pool::claim(std::uint64_t published, int owner) {
  const std::uint32_t generation = generation_of(published);
  const auto how = static_cast<Claim>(upper_of(published));
  const auto tiles = static_cast<std::int32_t>(lower_of(published));
  std::atomic<std::uint64_t>& word = ranges_[static_cast<std::size_t>(owner)].word;
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  for (;;) {
    const auto age = static_cast<std::int32_t>(generation - generation_of(seen));
    if (age < 0) return {0, 0};  // this thread is late: another job has begun
    Tiles rest{static_cast<std::int32_t>(upper_of(seen)), static_cast<std::int32_t>(lower_of(seen))};
    if (age > 0) rest = {tiles * owner / threads(), tiles * (owner + 1) / threads()};
    if (rest.count() == 0) return rest;
    const std::int32_t count = how == Claim::kOne ? 1 : how == Claim::kHalf ? (rest.count() + 1) / 2 : rest.count();
    const Tiles taken{rest.begin, rest.begin + count};
    const std::uint64_t left =
        pack(generation, static_cast<std::uint32_t>(taken.end), static_cast<std::uint32_t>(rest.end));
    if (word.compare_exchange_weak(seen, left, std::memory_order_relaxed)) return taken;
  }
}

// Computes tiles until none is left; returns how many.
std::int32_t Pool::work(std::uint64_t published, int thread) {
  std::int32_t done = 0;
  const int victims = static_cast<Claim>(upper_of(published)) == Claim::kOwn ? 1 : threads();
  for (int i = 0; i < victims; ++i) {
    for (;;) {
      const Tiles tiles = claim(published, (thread + i) % threads());
      if (tiles.count() == 0) break;
      compute(job_, tiles, thread);
      done += tiles.count();
    }
  }
  return done;
}

void Pool::compute(const Job& job, Tiles tiles, int thread) {
  for (std::int32_t begin = tiles.begin; begin < tiles.end;) {
    const std::int32_t end = job.claim == Claim::kOne ? begin + 1 : tiles.end;
    try {
      job.call(job.context, job.first + begin, job.first + end, thread);
    } catch (...) {
      const std::lock_guard lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
    begin = end;
  }
}

void Pool::sleep_while(std::uint64_t published) {
  const std::uint32_t wakes = wakes_.load();
  helpers_sleep_.store(true);
  if (published_.load() == published) futex_wait(wakes_, wakes);
}

void Pool::help(int thread) {
  const KernelFpu fpu;
  std::uint64_t seen = 0;
  for (;;) {
    const auto changed = [&] { return published_.load(std::memory_order_acquire) != seen; };
    if (!spin_until(changed, kHelperSpin))
      while (!changed()) sleep_while(seen);
    if (stopping_.load(std::memory_order_acquire)) return;
    seen = published_.load(std::memory_order_acquire);
    const std::int32_t done = work(seen, thread);
    if (done == 0) continue;
    finished_.fetch_add(static_cast<std::uint32_t>(done));  // after this the job may change
    if (caller_sleeps_.load()) futex_wake(finished_, 1);
  }
}

}  // namespace octavo
