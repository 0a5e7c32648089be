// The extension module octavo.backends.cpu._native.
#include <nanobind/nanobind.h>

#include "bindings/registry.h"

NB_MODULE(_native, m) {
  m.doc() = "Native core of the cpu backend.";
  octavo::register_program(m);
  octavo::register_linear(m);
  octavo::register_sampler(m);
  octavo::register_bench(m);
}
