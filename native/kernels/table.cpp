// Assembles one instruction set's kernel table.
#include "kernels/kernels.h"
#include "kernels/ops.h"

namespace octavo {
namespace OCTAVO_ISA {

#define OCTAVO_STRING_(x) #x
#define OCTAVO_STRING(x) OCTAVO_STRING_(x)

const Kernels* kernels() {
  static const Kernels table = {
      OCTAVO_STRING(OCTAVO_ISA),
      quantize_row,
      to_bf16_row,
      linear,
      rms_norm,
      add_rows,
      silu_mul,
      silu_mul_panels,
      rope,
      kv_write,
      attend,
      merge_splits,
      scan_row,
      exponentials,
      collect,
      rank,
  };
  return &table;
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
