// Temporary: empty registrations for binding files that do not exist yet (CMakeLists.txt defines OCTAVO_ABSENT_<name>).
#include "bindings/registry.h"

namespace octavo {
#ifdef OCTAVO_ABSENT_program
void register_program(nanobind::module_&) {}
#endif
#ifdef OCTAVO_ABSENT_linear
void register_linear(nanobind::module_&) {}
#endif
#ifdef OCTAVO_ABSENT_sampler
void register_sampler(nanobind::module_&) {}
#endif
}  // namespace octavo
