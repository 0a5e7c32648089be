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
  CHECK(!contention.alone(now));
  contention.waited(10us, 50us, now);  // any tile may take that long
  contention.waited(10ms, 2ms, now);   // or, among long ones, that long
  CHECK(!contention.alone(now));
  contention.waited(1ms, 3ms, now);
  CHECK(contention.alone(now + 5ms));
  CHECK(!contention.alone(now + 20ms));
  now += 20ms;
  contention.waited(1ms, 3ms, now);  // again: longer
  CHECK(contention.alone(now + 20ms));
  for (int i = 0; i < 20; ++i) contention.waited(1ms, 3ms, now);
  CHECK(contention.alone(now + 180ms));
  CHECK(!contention.alone(now + 251ms));  // it never gives up
  now += 1s;
  contention.waited(1ms, 3ms, now);  // a rare one
  CHECK(contention.alone(now + 5ms));
  CHECK(!contention.alone(now + 20ms));
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
  works_alone_after_fork();
  memory();
  return octavo::test::failures();
}
