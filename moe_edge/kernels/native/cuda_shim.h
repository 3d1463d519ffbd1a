// CUDA on the host, as far as our kernels and work beside a program need it: blocks,
// threads and a warp's lanes are loops, streams and events records.
//
// What a stream is given runs when another stream waits for an event behind it,
// not before: who forgets to wait reads what was there. The stream of XLA's thunks alone
// runs at once. What streams are given, and what kernels load from the host's records,
// is noted for tests.

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_calls.h"

namespace moe_edge::shim {

struct Size {
  unsigned x = 1;
};
inline thread_local Size gridDim, blockDim, blockIdx, threadIdx;

// Whatever the memory holds.
struct [[gnu::may_alias]] alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
struct Lanes {
  T each[32];
  T& operator[](int lane) { return each[lane]; }
};

// In the order of a GPU's shuffles.
inline void SumLanes(Lanes<float>& sums) {
  for (int apart = 16; apart > 0; apart /= 2) {
    const Lanes<float> before = sums;
    for (int lane = 0; lane < 32; ++lane) sums[lane] += before.each[lane ^ apart];
  }
}

// Memory whose loaded bytes are counted.
struct Counted {
  const unsigned char* from = nullptr;
  int64_t bytes = 0, loaded = 0;

  void Add(const unsigned char* at, int64_t size) {
    if (at >= from && at < from + bytes) loaded += size;
  }
};
inline thread_local Counted of_host, of_slots;

template <class Item>
Item LoadItem(const unsigned char* at, bool known) {
  Item found{};
  if (!known) return found;
  of_host.Add(at, sizeof found), of_slots.Add(at, sizeof found);
  std::memcpy(&found, at, sizeof found);
  return found;
}

inline uint4 LoadSixteen(const unsigned char* at, bool known) {
  return LoadItem<uint4>(at, known);
}

#define MOE_EDGE_ON_HOST
#define EACH_LANE(lane) for (int lane = 0; lane < 32; ++lane)
#define UNROLLED
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#include "few.cu"
#include "prefetch.cu"
#undef __launch_bounds__
#undef __forceinline__
#undef __global__
#undef __device__
#undef UNROLLED
#undef EACH_LANE
#undef MOE_EDGE_ON_HOST

using Work = std::vector<std::function<void()>>;

struct Stream {
  const char* name;
  Work work;  // behind no event yet
};

struct Event {
  Work work;  // before it
};

// The stream of XLA's own thunks, which the host runs at once.
inline Stream& Compute() {
  static Stream stream{"compute", {}};
  return stream;
}

struct Notes {
  std::mutex mutex;
  bool wanted = false;
  std::string text;

  void Add(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (wanted) text += what + "\n";
  }
};

inline Notes& Noted() {
  static Notes notes;
  return notes;
}

inline std::function<void()> Prefetching(void** arguments, unsigned blocks, unsigned) {
  return [given = *static_cast<Prefetch*>(arguments[0]), blocks] {
    gridDim.x = blocks, blockDim.x = 32;  // a warp a block
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
      for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
        moe_edge_prefetch(given);
      }
    }
    int64_t copied = 0;
    for (int entry = 0; entry < given.count; ++entry) copied += given.plan[entry] >= 0;
    Noted().Add("copied " + std::to_string(copied * given.record_bytes) + " bytes");
  };
}

template <void (*kernel)(Few)>
std::function<void()> Multiplying(void** arguments, unsigned blocks, unsigned threads) {
  return [given = *static_cast<Few*>(arguments[0]), warps = blocks * (threads / 32)] {
    of_host = {given.host, given.host_count * given.record_bytes};
    of_slots = {given.slots, given.slot_count * given.record_bytes};
    blockDim.x = 32, threadIdx.x = 0;  // a block is a warp, its lanes loops
    for (blockIdx.x = 0; blockIdx.x < warps; ++blockIdx.x) kernel(given);
    Noted().Add("loaded " + std::to_string(of_host.loaded) + " bytes of the host, " +
                std::to_string(of_slots.loaded) + " of slots");
    of_host = of_slots = {};
  };
}

// What makes work of a launch: of its arguments, blocks and threads of a block.
using Kernel = std::function<void()> (*)(void**, unsigned, unsigned);
struct Named {
  const char* name;
  Kernel kernel;
};
inline constexpr Named kKernels[] = {
    {"moe_edge_prefetch", Prefetching},
    {"moe_edge_few_bfloat16", Multiplying<moe_edge_few_bfloat16>},
    {"moe_edge_few_float32", Multiplying<moe_edge_few_float32>},
};

inline int StreamContext(void*, void** context) { return *context = &Compute(), 0; }
inline int PushContext(void*) { return 0; }
inline int PopContext(void**) { return 0; }

inline constexpr char kPrefetch[] = "prefetch", kAssist[] = "assist";
inline constexpr char kFew[] = "few";

template <const char* name>
int CreateStream(void** stream, unsigned) {
  return *stream = new Stream{name, {}}, 0;
}

// How many were made: none is ever destroyed.
inline std::atomic<int64_t>& Events() {
  static std::atomic<int64_t> count{0};
  return count;
}

inline int CreateEvent(void** event, unsigned) {
  ++Events();
  return *event = new Event, 0;
}

inline int Record(void* event, void* stream) {
  auto* on = static_cast<Stream*>(stream);
  Noted().Add(std::string(on->name) + " records");
  static_cast<Event*>(event)->work = std::move(on->work);
  on->work.clear();
  return 0;
}

inline int Wait(void* stream, void* event, unsigned) {
  Noted().Add(std::string(static_cast<Stream*>(stream)->name) + " waits");
  const Work before = std::move(static_cast<Event*>(event)->work);
  static_cast<Event*>(event)->work.clear();
  for (const auto& each : before) each();
  return 0;
}

// Gives a stream what is to be done.
inline int Give(void* stream, const char* what, std::function<void()> work) {
  auto* on = static_cast<Stream*>(stream);
  Noted().Add(std::string(on->name) + what);
  if (on == &Compute()) {
    work();
  } else {
    on->work.push_back(std::move(work));
  }
  return 0;
}

inline int Load(void** module, const void*) { return *module = nullptr, 0; }
inline int Function(void** function, void*, const char* name) {
  for (const Named& each : kKernels) {
    if (std::strcmp(each.name, name) != 0) continue;
    return *function = const_cast<Named*>(&each), 0;
  }
  return 1;
}

inline int LaunchKernel(void* function, unsigned blocks, unsigned, unsigned,
                        unsigned threads, unsigned, unsigned, unsigned, void* stream,
                        void** arguments, void**) {
  const Kernel kernel = static_cast<const Named*>(function)->kernel;
  return Give(stream, " launches", kernel(arguments, blocks, threads));
}

inline int Allocate(void** host, size_t bytes, unsigned) {
  Noted().Add("allocates");
  return *host = std::malloc(bytes), *host == nullptr;
}

inline int Copy(void* to, const void* from, size_t bytes, void* stream) {
  return Give(stream, " copies", [=] { std::memcpy(to, from, bytes); });
}

inline int CopyDown(void* host, uint64_t device, size_t bytes, void* stream) {
  return Copy(host, reinterpret_cast<const void*>(device), bytes, stream);
}

inline int CopyUp(uint64_t device, const void* host, size_t bytes, void* stream) {
  return Copy(reinterpret_cast<void*>(device), host, bytes, stream);
}

inline int CallHost(void* stream, void (*function)(void*), void* given) {
  return Give(stream, " calls the host", [=] { function(given); });
}

// The table of one kind of work, whose stream, if it has one of its own, has its name.
template <const char* name>
constexpr CudaCalls Calls() {
  return {StreamContext, PushContext, PopContext, CreateStream<name>, CreateEvent,
          Record,        Wait,        Load,       Function,           LaunchKernel,
          Allocate,      CopyDown,    CopyUp,     CallHost};
}

}  // namespace moe_edge::shim
