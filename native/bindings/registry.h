// The parts of the extension module, each defined in the file of its name.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo {

void register_program(nanobind::module_& m);  // program.cpp: instruction sets, thread pool, KV cache, recorded forwards
void register_linear(nanobind::module_& m);   // linear.cpp: packed matrices and single linear ops
void register_sampler(nanobind::module_& m);  // sampler.cpp
void register_bench(nanobind::module_& m);    // bench.cpp: timed loops

}  // namespace octavo
