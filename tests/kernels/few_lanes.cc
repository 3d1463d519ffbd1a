// The kernel for few rows with a thread for each lane of a warp, as on a GPU: the bits
// of the host's loops over lanes. For the thread sanitizer, too.
#include <atomic>
#include <barrier>
#include <cstdio>
#include <random>
#include <thread>
#include <tuple>

#include "cuda_shim.h"

using moe_edge::shim::Few;

namespace gpu {

using moe_edge::shim::__uint_as_float;
using moe_edge::shim::uint4;
thread_local moe_edge::shim::Size blockDim, blockIdx, threadIdx;

struct Warp {
  std::barrier<> all{32};  // a lane that does not come stops them
  float given[2][32];
  int number;
};
thread_local Warp* warp;
thread_local int turn;

float __shfl_xor_sync(unsigned, float value, int apart) {
  const int lane = threadIdx.x % 32;
  float* given = warp->given[turn++ % 2];
  given[lane] = value;
  warp->all.arrive_and_wait();
  return given[lane ^ apart];
}

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define moe_edge_few_bfloat16 lanes_bfloat16
#define moe_edge_few_float32 lanes_float32
#include "few.cu"
#undef moe_edge_few_bfloat16
#undef moe_edge_few_float32

// Two warps at once, which take numbers in turn and know nothing else of each other.
void Run(void (*kernel)(Few), const ::Few& given, int warps) {
  static Warp both[2];
  std::atomic<int> next{0};
  std::vector<std::thread> threads;
  for (Warp& own : both) {
    for (unsigned lane = 0; lane < 32; ++lane) {
      threads.emplace_back([&, lane] {
        warp = &own, turn = 0;
        for (;;) {
          if (lane == 0) own.number = next.fetch_add(1, std::memory_order_relaxed);
          own.all.arrive_and_wait();
          const int number = own.number;
          own.all.arrive_and_wait();
          if (number >= warps) return;
          blockDim.x = 128, blockIdx.x = number / 4;
          threadIdx.x = number % 4 * 32 + lane;
          Few own_given;
          std::memcpy(&own_given, &given, sizeof own_given);
          kernel(own_given);
          own.all.arrive_and_wait();
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace gpu

constexpr int kExperts = 9, kSlots = 11, kTopK = 3;  // expert e in slot e + 1
constexpr int kTokens = 5, kPairs = kTokens * kTopK;

struct Rows {  // as `plan` of kernels/few.py makes them
  std::vector<int> record, row, count, pair, host;

  // Experts have five rows, three, two and one; the even ones are absent.
  Rows() {
    std::vector<std::vector<int>> pairs(kExperts);
    for (int t = 0; t < kTokens; ++t) {
      const int chosen[kTopK] = {0, 1 + t % 2, 3 + t};
      for (int k = 0; k < kTopK; ++k) pairs[chosen[k]].push_back(t * kTopK + k);
    }
    for (bool absent : {true, false}) {
      for (int e = 0; e < kExperts; ++e) {
        if ((e % 2 == 0) != absent || pairs[e].empty()) continue;
        record.push_back(e + 1), row.push_back(int(pair.size()));
        count.push_back(int(pairs[e].size())), host.push_back(absent ? e : -1);
        pair.insert(pair.end(), pairs[e].begin(), pairs[e].end());
      }
    }
    for (auto* each : {&record, &row, &count}) each->resize(kPairs, 0);
    host.resize(kPairs, -1);
  }
};

template <class T>
std::vector<T> Random(size_t size) {
  static std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<T> found(size);
  for (T& each : found) {
    const float value = normal(random);
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits >>= 8 * (4 - sizeof(T));
    std::memcpy(&each, &bits, sizeof(T));
  }
  return found;
}

// How many of two launches, gate with up and down, have other bits.
template <class Item>
int Wrong(int width, int neurons, bool biases, void (*loops)(Few),
          void (*lanes)(gpu::Few)) {
  const Rows rows;
  const long matrix = long(width) * neurons, item = sizeof(Item);
  const long record = (3 * matrix + (biases ? 2 * neurons + width : 0) + 31) / 32 * 32;
  auto host = Random<Item>(kExperts * record), slots = Random<Item>(kSlots * record);
  auto other_slots = slots;
  const auto scale = Random<float>(kPairs);
  int wrong = 0;
  for (bool down : {false, true}) {
    const int inputs = down ? neurons : width, outputs = down ? width : neurons;
    if (outputs > 64) continue;  // a thread a lane is slow
    const auto x = Random<float>(size_t(down ? kPairs : kTokens) * inputs);
    std::vector<float> out(size_t(kPairs) * outputs), other_out(out.size());
    Few a{};
    a.x = x.data(), a.out = out.data(), a.scale = down ? scale.data() : nullptr;
    a.slots = reinterpret_cast<unsigned char*>(slots.data());
    a.host = reinterpret_cast<const unsigned char*>(host.data());
    a.record = rows.record.data(), a.row = rows.row.data(), a.count = rows.count.data();
    a.pair = rows.pair.data(), a.absent = rows.host.data();
    a.miss_warps = 8, a.record_bytes = item * record;
    a.first[0] = down ? item * 2 * matrix : 0, a.first[1] = down ? -1 : item * matrix;
    a.bias[0] = a.bias[1] = -1;
    if (biases) a.bias[0] = item * (3 * matrix + (down ? 2 * neurons : 0));
    if (biases && !down) a.bias[1] = a.bias[0] + item * neurons;
    a.blocks = kPairs, a.width = inputs, a.outputs = outputs;
    a.slot_count = kSlots, a.host_count = kExperts, a.sharing = down ? 1 : kTopK;
    a.wide = item * inputs % 16 == 0;
    const int warps = a.miss_warps + moe_edge::shim::few::TasksOf(a) * a.blocks;
    moe_edge::shim::blockDim.x = 32;
    for (int warp = 0; warp < warps; ++warp) {
      moe_edge::shim::blockIdx.x = warp;
      loops(a);
    }
    a.slots = reinterpret_cast<unsigned char*>(other_slots.data());
    a.out = other_out.data();
    gpu::Run(lanes, a, warps);
    wrong += out != other_out || slots != other_slots || out[0] == 0;
  }
  return wrong;
}

int main() {
  int wrong = 0;
  // Loads of 16 bytes; single items; an odd number of outputs with biases; several
  // loads a lane.
  const std::tuple<int, int, bool> layouts[] = {
      {32, 4, false}, {13, 3, false}, {7, 8, true}, {264, 2, true}};
  for (const auto& [width, neurons, biases] : layouts) {
    wrong += Wrong<unsigned>(width, neurons, biases,
                             moe_edge::shim::moe_edge_few_float32, gpu::lanes_float32);
    wrong += Wrong<unsigned short>(width, neurons, biases,
                                   moe_edge::shim::moe_edge_few_bfloat16,
                                   gpu::lanes_bfloat16);
  }
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
