// The kernels for any processor.
#include "sets.h"

#define MOE_EDGE_SET 0
namespace moe_edge::portable {
#if defined(__aarch64__)
constexpr int kLanes = 4, kGroup = 8, kMany = 3;  // 24 of 32 registers
constexpr int kSpread = 6, kSpreadVectors = 4;
#else
constexpr int kLanes = 4, kGroup = 4, kMany = 2;  // 8 of 16: products need some, too
constexpr int kSpread = 4, kSpreadVectors = 2;
#endif
#include "one_set.inc"
constinit const Kernels kKernels = KernelsOf("portable");
}  // namespace moe_edge::portable
