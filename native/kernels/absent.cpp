// Temporary: definitions that abort, for kernel files that do not exist yet (CMakeLists.txt defines
// OCTAVO_ABSENT_<name>).
#include <stdlib.h>

#include "kernels/kernels.h"
#include "kernels/ops.h"

namespace octavo {
namespace OCTAVO_ISA {
#ifdef OCTAVO_ABSENT_linear
void quantize_row(const float*, int64_t, QuantBlock*) { abort(); }
void to_bf16_row(const float*, int64_t, uint16_t*) { abort(); }
void linear(const LinearArgs&, int64_t, int64_t) { abort(); }
#endif
#ifdef OCTAVO_ABSENT_elementwise
void rms_norm(const float*, const float*, int64_t, float, float*) { abort(); }
void add_rows(const float*, const float*, int64_t, float*) { abort(); }
void silu_mul(const float*, const float*, int64_t, float*) { abort(); }
void rope(const float*, int64_t, int64_t, int64_t, bool, const float*, const float*, float*) { abort(); }
#endif
#ifdef OCTAVO_ABSENT_attention
void kv_write(const KvCache&, const float*, const float*, int32_t, int32_t) { abort(); }
void attend(const AttendArgs&) { abort(); }
#endif
}  // namespace OCTAVO_ISA
}  // namespace octavo
