// The smallest test harness: CHECK reports a failure with its place and goes on; main returns failures().
#pragma once

#include <cstdio>
#include <string>

namespace octavo::test {

inline int& failure_count() {
  static int count = 0;
  return count;
}

inline void report(bool ok, const char* expression, const char* file, int line, const std::string& detail = "") {
  if (ok) return;
  if (++failure_count() <= 20)
    std::fprintf(stderr, "%s:%d: %s failed%s%s\n", file, line, expression, detail.empty() ? "" : ": ", detail.c_str());
}

inline int failures() {
  if (failure_count() > 0) std::fprintf(stderr, "%d checks failed\n", failure_count());
  return failure_count() == 0 ? 0 : 1;
}

template <typename Exception, typename Body>
bool throws(const Body& body) {
  try {
    body();
  } catch (const Exception&) {
    return true;
  }
  return false;
}

}  // namespace octavo::test

#define CHECK(expression) octavo::test::report(static_cast<bool>(expression), #expression, __FILE__, __LINE__)
#define CHECK_MSG(expression, detail) \
  octavo::test::report(static_cast<bool>(expression), #expression, __FILE__, __LINE__, detail)
