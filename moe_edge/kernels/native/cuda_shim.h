// CUDA on the host, as far as work beside a program needs it: the prefetch's kernel with
// blocks and threads as loops, streams and events as records.
//
// What a stream is given runs when another stream waits for an event behind it,
// not before: who forgets to wait reads what was there. What streams are given is noted
// for tests.

#pragma once

#include <atomic>
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

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

#define __global__
#define __device__
#include "prefetch.cu"
#undef __global__
#undef __device__

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

inline void Run(const Prefetch& given, unsigned blocks) {
  gridDim.x = blocks, blockDim.x = 32;  // a warp a block
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
      moe_edge_prefetch(given);
    }
  }
  long long copied = 0;
  for (int entry = 0; entry < given.count; ++entry) copied += given.plan[entry] >= 0;
  Noted().Add("copied " + std::to_string(copied * given.record_bytes) + " bytes");
}

inline int StreamContext(void*, void** context) { return *context = &Compute(), 0; }
inline int PushContext(void*) { return 0; }
inline int PopContext(void**) { return 0; }

inline constexpr char kPrefetch[] = "prefetch", kAssist[] = "assist";

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
  on->work.push_back(std::move(work));
  return 0;
}

inline int Load(void** module, const void*) { return *module = nullptr, 0; }
inline int Function(void** function, void*, const char*) {
  return *function = nullptr, 0;
}

inline int LaunchKernel(void*, unsigned blocks, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, void* stream, void** arguments, void**) {
  const Prefetch given = *static_cast<Prefetch*>(arguments[0]);
  return Give(stream, " launches", [=] { Run(given, blocks); });
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

// The table of one kind of work, whose stream has its name.
template <const char* name>
constexpr CudaCalls Calls() {
  return {StreamContext, PushContext, PopContext, CreateStream<name>, CreateEvent,
          Record,        Wait,        Load,       Function,           LaunchKernel,
          Allocate,      CopyDown,    CopyUp,     CallHost};
}

}  // namespace moe_edge::shim
