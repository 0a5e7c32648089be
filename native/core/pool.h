// The thread pool: the calling thread and N - 1 helpers share the tiles of one loop at a time.
//
// Each thread has a range of consecutive tiles, so that in every step the same thread reads the same weights, in order;
// who has none left takes from another's range. So a thread that is late, or never comes, delays nothing but tiles that
// it has begun; and where one thread does it all, it still reads everything in order. Against that there is
// `Contention`. Waiting is a bounded spin, then a futex: an idle pool uses no CPU, and a pool whose cores are busy with
// other work gives way to it. Who computes a tile is not defined, so a tile's result must not depend on it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace octavo {

// When to compute without helpers. A helper that loses its core to another process in the middle of a tile holds up the
// whole loop for a time slice, several milliseconds; and where all cores are busy, helpers take from the caller's own
// share of them. Where that costs more than helpers gain, the caller computes alone for a multiple of what was lost,
// then tries again; the multiple grows while that is so.
class Contention {
 public:
  using Clock = std::chrono::steady_clock;

  // Whether a loop that starts now is for the caller alone.
  bool alone(Clock::time_point now);
  // In a shared loop the caller had no tile left after `worked` and then waited for the others.
  void waited(Clock::duration worked, Clock::duration waited, Clock::time_point now);
  // Whether enough has been shared to look at how long the caller itself was kept from its core, by `delayed`.
  bool due() const;
  // How long that was, in all its life.
  void delayed(Clock::duration total, Clock::time_point now);

 private:
  void lost(Clock::duration time, Clock::duration gained, Clock::time_point now);

  Clock::time_point alone_until_{}, last_start_{};
  Clock::duration undisturbed_{};  // shared since the last loss
  Clock::duration shared_{};       // shared since `delayed`
  Clock::duration delay_{};        // what `delayed` told last
  bool delay_known_ = false;       // since `alone` last said yes
  int multiple_ = 0;
};

// How long a thread that could run has waited for a core, in all its life: of the thread that asks. Zero where the
// system does not tell. Source: proc(5), Linux's Documentation/scheduler/sched-stats.rst.
class RunDelay {
 public:
  RunDelay() = default;
  ~RunDelay();
  RunDelay(const RunDelay&) = delete;
  RunDelay& operator=(const RunDelay&) = delete;

  std::chrono::nanoseconds read();

 private:
  pid_t thread_ = 0;
  int file_ = -1;
};

class Pool {
 public:
  // `threads` counts the caller: 1 means no helpers. Throws std::invalid_argument outside 1..1024, std::system_error
  // when the system has no more threads.
  explicit Pool(int threads);
  // A child process after fork() inherits the pool without its helpers: it still works there, on the calling thread
  // alone.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(helpers_.size()) + 1; }

  // Calls body(tile) for every tile in 0..tiles-1 and returns when all have finished; what they wrote is then visible.
  // One caller at a time; bodies do not call it. If bodies throw, the other tiles still run and one of the exceptions
  // is thrown here.
  template <typename Body>
  void parallel_for(std::int32_t tiles, const Body& body) {
    const auto call = [](const void* context, std::int32_t begin, std::int32_t end, int) {
      for (std::int32_t tile = begin; tile < end; ++tile) (*static_cast<const Body*>(context))(tile);
    };
    run(call, &body, tiles, Claim::kOne);
  }

  // The same for body(begin, end, thread), which computes several consecutive tiles: as many as leave the others enough
  // to do. `thread` is below threads(), and no two threads have the same at a time.
  template <typename Body>
  void parallel_ranges(std::int32_t tiles, const Body& body) {
    const auto call = [](const void* context, std::int32_t begin, std::int32_t end, int thread) {
      (*static_cast<const Body*>(context))(begin, end, thread);
    };
    run(call, &body, tiles, Claim::kHalf);
  }

  // Calls body(thread) once on every thread and waits for all of them, however long other processes keep them from
  // their cores: to measure, not to compute.
  template <typename Body>
  void on_every_thread(const Body& body) {
    const auto call = [](const void* context, std::int32_t, std::int32_t, int thread) {
      (*static_cast<const Body*>(context))(thread);
    };
    run(call, &body, threads(), Claim::kOwn);
  }

 private:
  // How many tiles of a range a thread takes: one, half of what is left, or all of its own and none of another's.
  enum class Claim : std::uint8_t { kOne, kHalf, kOwn };
  using Call = void (*)(const void* context, std::int32_t begin, std::int32_t end, int thread);

  static constexpr std::int32_t kMostTiles = 0xffff;  // of one job

  struct Job {
    Call call;
    const void* context;
    std::int32_t first, tiles;
    Claim claim;
  };
  struct Tiles {
    std::int32_t begin, end;
    std::int32_t count() const { return end - begin; }
  };

  // What is left of a thread's range: generation, begin and end in one word. A word of an older generation stands for
  // the whole range, so publishing a job does not touch it.
  struct alignas(64) Range {
    std::atomic<std::uint64_t> word{0};
  };

  void run(Call call, const void* context, std::int32_t tiles, Claim claim);
  void share(const Job& job, Contention::Clock::time_point started);
  void wait();
  void help(int thread);
  Tiles claim(std::uint64_t published, int owner);
  std::int32_t work(std::uint64_t published, int thread);
  void compute(const Job& job, Tiles tiles, int thread);
  void rethrow();
  void sleep_while(std::uint64_t published);
  void stop();

  // Words that one side writes while another spins on them have a cache line of their own.
  // Generation, way of claiming and number of tiles of the newest job. Helpers spin on it, then find the job in the
  // same line.
  alignas(64) std::atomic<std::uint64_t> published_{0};
  Job job_{};  // stable from a claim until that tile is counted in finished_
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<std::uint32_t> finished_{0};  // tiles that helpers finished, in all jobs; wraps
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<bool> helpers_sleep_{false};  // some of them, or they did
  std::atomic<std::uint32_t> wakes_{0};
  std::unique_ptr<Range[]> ranges_;
  Contention contention_;
  RunDelay run_delay_;
  std::uint32_t expected_ = 0;  // finished_ at the end of the last job
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::vector<std::thread> helpers_;
  pid_t owner_;
};

}  // namespace octavo
