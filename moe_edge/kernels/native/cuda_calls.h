// CUDA's driver as far as work beside a program needs it, without its headers: the library is
// opened where there is one. Nothing here waits for a device.

#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace moe_edge {

struct CudaCalls {  // each returns 0, or CUDA's number of what went wrong
  int (*stream_context)(void* stream, void** context);
  int (*push_context)(void* context);
  int (*pop_context)(void** context);
  int (*create_stream)(void** stream, unsigned flags);
  int (*create_event)(void** event, unsigned flags);
  int (*record)(void* event, void* stream);
  int (*wait)(void* stream, void* event, unsigned flags);
  int (*load)(void** module, const void* image);
  int (*function)(void** function, void* module, const char* name);
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                void* stream, void** arguments, void** extra);
  int (*allocate)(void** host, size_t bytes, unsigned flags);
  int (*copy_down)(void* host, uint64_t device, size_t bytes, void* stream);
  int (*copy_up)(uint64_t device, const void* host, size_t bytes, void* stream);
  int (*call_host)(void* stream, void (*function)(void*), void* given);
};

// Those of libcuda; what is missing, or nothing.
inline std::string OpenCuda(CudaCalls* calls) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  const std::pair<const char*, void*> wanted[] = {
      {"cuStreamGetCtx", &calls->stream_context},
      {"cuCtxPushCurrent_v2", &calls->push_context},
      {"cuCtxPopCurrent_v2", &calls->pop_context},
      {"cuStreamCreate", &calls->create_stream},
      {"cuEventCreate", &calls->create_event},
      {"cuEventRecord", &calls->record},
      {"cuStreamWaitEvent", &calls->wait},
      {"cuModuleLoadData", &calls->load},
      {"cuModuleGetFunction", &calls->function},
      {"cuLaunchKernel", &calls->launch},
      {"cuMemHostAlloc", &calls->allocate},
      {"cuMemcpyDtoHAsync_v2", &calls->copy_down},
      {"cuMemcpyHtoDAsync_v2", &calls->copy_up},
      {"cuLaunchHostFunc", &calls->call_host},
  };
  for (const auto& [name, place] : wanted) {
    void* found = dlsym(library, name);
    if (found == nullptr) return dlerror();
    *static_cast<void**>(place) = found;
  }
  return "";
}

}  // namespace moe_edge
