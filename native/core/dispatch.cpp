#include "core/dispatch.h"

#include <cstdlib>
#include <stdexcept>

namespace octavo {
namespace {

using Table = const Kernels* (*)();

struct Candidate {
  const char* name;
  Table table;
  bool (*runs_here)();
};

#ifdef OCTAVO_HAVE_avx2
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
}
#endif
#ifdef OCTAVO_HAVE_avx512
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
#endif

constexpr Candidate kCandidates[] = {
    {"portable", &portable::kernels, [] { return true; }},
#ifdef OCTAVO_HAVE_avx2
    {"avx2", &avx2::kernels, &has_avx2},
#endif
#ifdef OCTAVO_HAVE_avx512
    {"avx512", &avx512::kernels, &has_avx512},
#endif
};

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Candidate& candidate : kCandidates)
    if (candidate.runs_here()) names.emplace_back(candidate.name);
  return names;
}

const Kernels& kernels_for(const std::string& isa) {
  for (const Candidate& candidate : kCandidates)
    if (isa == candidate.name && candidate.runs_here()) return *candidate.table();
  std::string names;
  for (const std::string& name : available_isas()) names += (names.empty() ? "" : ", ") + name;
  throw std::invalid_argument("instruction set '" + isa + "' cannot run here; available: " + names);
}

const Kernels& default_kernels() {
  const char* forced = std::getenv("OCTAVO_ISA");
  return kernels_for(forced != nullptr && *forced != '\0' ? forced : available_isas().back());
}

}  // namespace octavo
