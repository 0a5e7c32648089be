// Which instruction set's kernels run on this machine.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace octavo {

// Names of the kernel tables that this build has and this CPU can run, slowest first: portable, avx2, avx512.
std::vector<std::string> available_isas();

// The table of that name. Throws std::invalid_argument, naming the available ones, when it cannot run here.
const Kernels& kernels_for(const std::string& isa);

// The table that OCTAVO_ISA names, or the fastest available. Throws like kernels_for.
const Kernels& default_kernels();

}  // namespace octavo
