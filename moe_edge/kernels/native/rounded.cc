// Rounded vectors for each way of multiplying bytes (rounded.inc).
#include "sets.h"

namespace moe_edge::portable {
#define MOE_EDGE_DOT 0
#include "rounded.inc"
}  // namespace moe_edge::portable

#if defined(__x86_64__)
#undef MOE_EDGE_DOT
#define MOE_EDGE_DOT 2
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace moe_edge::avx2 {
#include "rounded.inc"
}  // namespace moe_edge::avx2
#pragma GCC pop_options

#undef MOE_EDGE_DOT
#define MOE_EDGE_DOT 512
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
namespace moe_edge::vnni {
#include "rounded.inc"
}  // namespace moe_edge::vnni
#pragma GCC pop_options
#endif
