// A warp's threads as lanes, on a GPU: each has one. cuda_shim.h has the host's.

template <class T>
struct Lanes {
  T own;
  __device__ T& operator[](int) { return own; }
};
#define EACH_LANE(lane) if (const int lane = threadIdx.x % 32; true)
#define UNROLLED _Pragma("unroll")

// Every lane gets the sum of all, by halves.
__device__ __forceinline__ void SumLanes(Lanes<float>& each) {
  UNROLLED for (int apart = 16; apart > 0; apart /= 2) {
    each.own += __shfl_xor_sync(0xffffffffu, each.own, apart);
  }
}

// Zeros unless `known`. Written as a load that depends on a predicate, because a branch
// would make each load wait for the one before.
__device__ __forceinline__ uint4 LoadSixteen(const unsigned char* at, bool known) {
  uint4 found;
  asm volatile(
      "{\n\t.reg .pred known;\n\tsetp.ne.s32 known, %5, 0;\n\t"
      "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
      "@known ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
      : "l"(at), "r"(int(known))
      : "memory");
  return found;
}

template <class Item>
__device__ __forceinline__ Item LoadItem(const unsigned char* at, bool known) {
  return known ? *(const Item*)at : Item(0);
}
