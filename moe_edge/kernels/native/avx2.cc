// The kernels for x86 processors with AVX2.
#include "sets.h"

#if defined(__x86_64__)
#define MOE_EDGE_SET 2
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace moe_edge::avx2 {
constexpr int kLanes = 8, kGroup = 4, kMany = 3;  // 12 of 16
constexpr int kSpread = 6, kSpreadVectors = 2;
#include "one_set.inc"
constinit const Kernels kKernels = KernelsOf("avx2");
}  // namespace moe_edge::avx2
#pragma GCC pop_options
#endif
