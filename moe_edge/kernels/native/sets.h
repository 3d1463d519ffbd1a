// The kernels of each instruction set, and what their files need.
//
// A set is a file of its own (portable.cc, avx2.cc, avx512.cc), so that compilers work on
// several at once. It says how many floats a register holds (kLanes) and the tiles of sums
// that registers hold (blocks.inc, gradients.inc): not by macros such as __AVX512F__, as
// the compiler has read all of them before the pragmas act. MOE_EDGE_SET says which
// intrinsics rows.inc may use.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__)
// GCC 12 warns of the undefined vectors in its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#endif

#include "blocks.h"
#include "delta.h"
#include "gradients.h"
#include "rounded.h"
#include "team.h"
#include "types.h"

namespace moe_edge {
namespace portable {
extern const Kernels kKernels;
extern const RoundedKernels kRounded;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
extern const RoundedKernels kRounded;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace vnni {
extern const RoundedKernels kRounded;
}
#endif
}  // namespace moe_edge
