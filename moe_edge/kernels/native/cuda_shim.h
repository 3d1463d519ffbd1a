// CUDA on the host, as far as the prefetch needs it: its kernel with blocks and threads
// as loops, streams and events as records.
//
// What is launched on a stream runs when another stream waits for an event behind it,
// not before: who forgets to wait reads what was there. What streams are given is noted
// for tests.

#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_calls.h"

namespace moe_edge::shim {

struct Size {
  unsigned x = 1;
};
inline thread_local Size gridDim, blockDim, blockIdx, threadIdx;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

#define __global__
#define __device__
#include "prefetch.cu"
#undef __global__
#undef __device__

struct Launch {
  Prefetch given;
  unsigned blocks;
};

struct Stream {
  const char* name;
  std::vector<Launch> launches;  // behind no event yet
};

struct Event {
  std::vector<Launch> launches;  // before it
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

inline void Run(const Launch& launch) {
  gridDim.x = launch.blocks, blockDim.x = 32;  // a warp a block
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
      moe_edge_prefetch(launch.given);
    }
  }
  long long copied = 0;
  for (int entry = 0; entry < launch.given.count; ++entry) {
    copied += launch.given.plan[entry] >= 0;
  }
  Noted().Add("copied " + std::to_string(copied * launch.given.record_bytes) + " bytes");
}

inline int StreamContext(void*, void** context) { return *context = &Compute(), 0; }
inline int PushContext(void*) { return 0; }
inline int PopContext(void**) { return 0; }

inline int CreateStream(void** stream, unsigned) {
  return *stream = new Stream{"prefetch", {}}, 0;
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
  static_cast<Event*>(event)->launches = std::move(on->launches);
  on->launches.clear();
  return 0;
}

inline int Wait(void* stream, void* event, unsigned) {
  auto* before = static_cast<Event*>(event);
  Noted().Add(std::string(static_cast<Stream*>(stream)->name) + " waits");
  for (const Launch& launch : before->launches) Run(launch);
  before->launches.clear();
  return 0;
}

inline int Load(void** module, const void*) { return *module = nullptr, 0; }
inline int Function(void** function, void*, const char*) {
  return *function = nullptr, 0;
}

inline int LaunchKernel(void*, unsigned blocks, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, void* stream, void** arguments, void**) {
  auto* on = static_cast<Stream*>(stream);
  Noted().Add(std::string(on->name) + " launches");
  on->launches.push_back({*static_cast<Prefetch*>(arguments[0]), blocks});
  return 0;
}

inline constexpr CudaCalls kCalls = {StreamContext, PushContext, PopContext, CreateStream,
                                     CreateEvent,   Record,      Wait,       Load,
                                     Function,      LaunchKernel};

}  // namespace moe_edge::shim
