// Copies records of experts from the host's memory into slots of the device.
//
// One source, compiled twice: by NVRTC for a GPU (kernels/nvrtc.py), and with the host
// kernels, where cuda_shim.h says what CUDA's words mean. No block waits for another.

struct Prefetch {  // what a launch is given, by value
  const int* plan;  // [2, count]: the record of each entry, -1: none; then its slot
  const unsigned char* host;  // records, one after another
  unsigned char* slots;
  long long record_bytes;
  int count, records, num_slots;
};

// All threads of the launch share a record; each has four loads in flight, because one
// over the link takes a microsecond and more.
template <typename Word>
__device__ void CopyRecord(Word* __restrict__ to, const Word* __restrict__ from,
                           long long words) {
  const long long threads = (long long)gridDim.x * blockDim.x;
  long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; at + 3 * threads < words; at += 4 * threads) {
    const Word a = from[at], b = from[at + threads];
    const Word c = from[at + 2 * threads], d = from[at + 3 * threads];
    to[at] = a, to[at + threads] = b;
    to[at + 2 * threads] = c, to[at + 3 * threads] = d;
  }
  for (; at < words; at += threads) to[at] = from[at];
}

extern "C" __global__ void moe_edge_prefetch(Prefetch a) {
  const unsigned long long all = (unsigned long long)a.host |
                                 (unsigned long long)a.slots | a.record_bytes;
  for (int entry = 0; entry < a.count; ++entry) {
    const int record = a.plan[entry], slot = a.plan[a.count + entry];
    if (record < 0 || record >= a.records || slot < 0 || slot >= a.num_slots) continue;
    const unsigned char* from = a.host + record * a.record_bytes;
    unsigned char* to = a.slots + slot * a.record_bytes;
    if (all % sizeof(uint4) == 0) {
      CopyRecord((uint4*)to, (const uint4*)from, a.record_bytes / sizeof(uint4));
    } else {
      CopyRecord(to, from, a.record_bytes);
    }
  }
}
