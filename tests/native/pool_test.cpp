#include "core/pool.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "core/memory.h"

using octavo::Pool;
using octavo::test::throws;

namespace {

// Each loop reads what the loop before it wrote, in other tiles: a missing happens-before shows here and under
// ThreadSanitizer.
void every_tile_runs_once_and_loops_are_ordered(int threads, int loops) {
  Pool pool(threads);
  CHECK(pool.threads() == threads);
  constexpr int kTiles = 37;
  std::vector<long> a(kTiles, 0), b(kTiles, 0);
  for (int loop = 0; loop < loops; ++loop) {
    pool.parallel_for(kTiles, [&](int tile) { b[tile] = a[(tile + 1) % kTiles] + 1; });
    pool.parallel_for(kTiles, [&](int tile) { a[tile] = b[(tile + 5) % kTiles]; });
  }
  for (int tile = 0; tile < kTiles; ++tile) CHECK(a[tile] == loops);
}

void every_tile_is_in_one_range(int threads) {
  Pool pool(threads);
  for (const int tiles : {1, 2, threads, 37, 1000, 200'000}) {
    std::vector<int> calls(static_cast<std::size_t>(tiles), 0);
    std::vector<std::atomic<int>> inside(static_cast<std::size_t>(threads));
    pool.parallel_ranges(tiles, [&](int begin, int end, int thread) {
      CHECK(0 <= begin && begin < end && end <= tiles && 0 <= thread && thread < threads);
      CHECK(++inside[thread] == 1);
      for (int tile = begin; tile < end; ++tile) ++calls[tile];
      --inside[thread];
    });
    for (const int count : calls) CHECK(count == 1);
  }
}

void every_thread_takes_part() {
  Pool pool(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<int> calls(3, 0);
    pool.on_every_thread([&](int thread) { ++calls[thread]; });
    for (const int count : calls) CHECK(count == 1);
  }
}

void edge_counts() {
  Pool pool(2);
  std::atomic<int> calls{0};
  pool.parallel_for(0, [&](int) { ++calls; });
  pool.parallel_for(-3, [&](int) { ++calls; });
  CHECK(calls == 0);
  pool.parallel_for(1, [&](int) { ++calls; });
  pool.parallel_for(2, [&](int) { ++calls; });
  CHECK(calls == 3);
  CHECK(throws<std::invalid_argument>([] { Pool none(0); }));
  CHECK(throws<std::invalid_argument>([] { Pool many(1025); }));
}

void exceptions_reach_the_caller() {
  Pool pool(3);
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> calls{0};
    CHECK(throws<std::runtime_error>([&] {
      pool.parallel_for(16, [&](int tile) {
        ++calls;
        if (tile % 5 == 0) throw std::runtime_error("tile");
      });
    }));
    CHECK(calls == 16);
    calls = 0;
    pool.parallel_for(16, [&](int) { ++calls; });
    CHECK(calls == 16);
  }
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

void idle_uses_no_cpu_and_wakes_again() {
  Pool pool(4);
  std::atomic<int> calls{0};
  pool.parallel_for(64, [&](int) { ++calls; });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // lets the helpers' spin end
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK(cpu_seconds() - before < 0.02);
  pool.parallel_for(64, [&](int) { ++calls; });
  CHECK(calls == 128);
}

// Waits longer than the spin at the end of a loop, so that the caller sleeps on the futex.
void slow_tiles() {
  Pool pool(2);
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> calls{0};
    pool.parallel_for(2, [&](int tile) {
      std::this_thread::sleep_for(std::chrono::microseconds(tile == 1 ? 500 : 10));
      ++calls;
    });
    CHECK(calls == 2);
  }
}

// Time is what the test says.
void stalls_make_it_compute_alone() {
  using namespace std::chrono_literals;
  octavo::Contention contention;
  auto now = octavo::Contention::Clock::time_point{} + 1h;
  const auto share = [&](std::chrono::milliseconds time) {  // loops of 1 ms
    for (; time > 0ms; time -= 1ms, now += 1ms) CHECK(!contention.alone(now));
  };
  const auto stall = [&](std::chrono::microseconds worked, std::chrono::microseconds waited) {
    CHECK(!contention.alone(now));
    now += worked + waited;
    contention.waited(worked, waited, now);
  };
  const auto alone_after = [&](std::chrono::milliseconds time) {
    octavo::Contention later = contention;
    return later.alone(now + time);
  };
  share(20ms);
  stall(10us, 50us);  // any tile may take that long
  stall(12ms, 2ms);   // or, among long ones, that long
  share(20ms);
  stall(100us, 3ms);  // bearable: a small part of the time
  stall(100us, 3ms);
  CHECK(alone_after(5ms));
  now += 20ms;
  stall(100us, 3ms);  // again: longer
  CHECK(alone_after(20ms));
  for (int i = 0; i < 10; ++i) {
    now += 500ms;  // at the longest
    stall(100us, 3ms);
  }
  CHECK(alone_after(300ms));
  now += 10s;  // idle, which proves nothing
  stall(100us, 4ms);
  CHECK(alone_after(400ms));
  now += 500ms;
  share(100ms);
  stall(100us, 4ms);
  share(1ms);
}

// Where the caller itself waits for a core, helpers take from its share.
void a_delayed_caller_computes_alone() {
  using namespace std::chrono_literals;
  octavo::Contention contention;
  auto now = octavo::Contention::Clock::time_point{} + 1h;
  const auto share = [&] {
    for (int i = 0; i < 10; ++i, now += 1ms) CHECK(!contention.alone(now));
    CHECK(contention.due());
  };
  CHECK(contention.due());
  contention.delayed(70ms, now);  // what was before does not count
  CHECK(!contention.due());
  share();
  contention.delayed(72ms, now);  // a fifth
  CHECK(!contention.due());
  share();
  contention.delayed(78ms, now);  // more than half
  CHECK(contention.alone(now));
  now += 24ms;
  CHECK(!contention.alone(now));
  CHECK(contention.due());
  contention.delayed(99ms, now);  // nor does what was while it computed alone
  share();
  contention.delayed(99ms, now);
  CHECK(!contention.alone(now));
}

void run_delay_is_of_the_thread_that_asks() {
  octavo::RunDelay delay;
  const auto before = delay.read();
  CHECK(before.count() >= 0 && delay.read() >= before);
  std::thread([&] { CHECK(delay.read().count() >= 0); }).join();
  CHECK(delay.read() >= before);
}

void works_alone_after_fork() {
  Pool pool(2);
  std::atomic<int> calls{0};
  pool.parallel_for(8, [&](int) { ++calls; });
  const pid_t child = fork();
  if (child == 0) {
    calls = 0;
    pool.parallel_for(8, [&](int) { ++calls; });
    _exit(calls == 8 ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void memory() {
  CHECK(throws<std::bad_alloc>([] { octavo::Mapping too_large(SIZE_MAX, octavo::Mapping::Pages::kOrdinary); }));
  octavo::Mapping mapping(1, octavo::Mapping::Pages::kOrdinary);
  octavo::Mapping moved = std::move(mapping);
  CHECK(moved.size() >= 1 && moved.data()[0] == 0);
  CHECK(reinterpret_cast<std::uintptr_t>(moved.data()) % (2 << 20) == 0);
  CHECK(mapping.data() == nullptr && mapping.size() == 0);
}

}  // namespace

int main() {
  for (const int threads : {1, 2, 3, 16}) every_tile_runs_once_and_loops_are_ordered(threads, 2000 / threads);
  for (const int threads : {1, 2, 5}) every_tile_is_in_one_range(threads);
  every_thread_takes_part();
  edge_counts();
  exceptions_reach_the_caller();
  idle_uses_no_cpu_and_wakes_again();
  slow_tiles();
  stalls_make_it_compute_alone();
  a_delayed_caller_computes_alone();
  run_delay_is_of_the_thread_that_asks();
  works_alone_after_fork();
  memory();
  return octavo::test::failures();
}
