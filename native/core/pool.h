// The thread pool: the calling thread and N - 1 helpers share the tiles of one loop at a time.
//
// Tiles are claimed one by one, so a late or descheduled thread delays only tiles that it has already claimed; a thread
// that never wakes up delays nothing. Waiting is a bounded spin, then a futex: an idle pool uses no CPU, and a pool
// whose cores are busy with other work gives way to it. Who computes a tile is not defined, so a tile's result must not
// depend on it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace octavo {

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
    static_assert(std::is_invocable_v<const Body&, std::int32_t>);
    if (tiles <= 0) return;
    if (tiles == 1 || helpers_.empty()) {
      for (std::int32_t tile = 0; tile < tiles; ++tile) body(tile);
      return;
    }
    run({[](const void* context, std::int32_t tile) { (*static_cast<const Body*>(context))(tile); }, &body, tiles});
  }

 private:
  struct Job {
    void (*call)(const void* context, std::int32_t tile);
    const void* context;
    std::int32_t tiles;
  };

  void run(const Job& job);
  void help();
  void claim_tiles();
  void stop();

  // Each group of words that one side writes while another spins on it has a cache line of its own.
  alignas(64) Job job_{};  // stable from a successful claim until that tile is counted in finished_
  alignas(64) std::atomic<std::int32_t> unclaimed_{0};
  alignas(64) std::atomic<std::int32_t> finished_{0};
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<std::uint32_t> generation_{0};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<std::int32_t> sleepers_{0};
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::vector<std::thread> helpers_;
  pid_t owner_;
};

}  // namespace octavo
