// The kernels for x86 processors with AVX-512.
#include "sets.h"

#if defined(__x86_64__)
#define MOE_EDGE_SET 512
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
namespace moe_edge::avx512 {
constexpr int kLanes = 16, kGroup = 8, kMany = 3;  // 24 of 32
constexpr int kSpread = 6, kSpreadVectors = 4;
#include "one_set.inc"
constinit const Kernels kKernels = KernelsOf("avx512");
}  // namespace moe_edge::avx512
#pragma GCC pop_options
#endif
