// What gives a GPU work by CUDA's driver: contexts, and what went wrong.

#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cuda_calls.h"

namespace moe_edge {

class Driver {
 public:
  explicit Driver(const CudaCalls& calls) : calls_(calls) {}
  virtual ~Driver() = default;

 protected:
  bool Done(const char* what, int status) {
    if (status != 0) failed_ = std::string(what) + " failed: " + std::to_string(status);
    return status == 0;
  }

  // A kernel of an image, in the context that is current; null: it failed.
  void* FunctionOf(const char* image, const char* name) {
    void *module = nullptr, *function = nullptr;
    if (Done("cuModuleLoadData", calls_.load(&module, image))) {
      Done("cuModuleGetFunction", calls_.function(&function, module, name));
    }
    return failed_.empty() ? function : nullptr;
  }

  // The calling thread is in the context of a stream. Nothing has failed yet.
  struct Within {
    Within(Driver& owner, void* stream) : owner(owner) {
      owner.failed_.clear();
      pushed = owner.Done("cuStreamGetCtx",
                          owner.calls_.stream_context(stream, &context)) &&
               owner.Done("cuCtxPushCurrent", owner.calls_.push_context(context));
    }
    ~Within() {
      if (pushed) owner.calls_.pop_context(&context);
    }
    Driver& owner;
    void* context = nullptr;
    bool pushed = false;
  };

  const CudaCalls calls_;
  std::mutex mutex_;    // of a call
  std::string failed_;  // of the call that runs
};

// Opens CUDA's driver for one kind of work; what is wrong, or null. Who comes second,
// from another thread, too, keeps what is open: programs may be using it. The text stands
// until the next call.
template <class Work, class... Given>
const char* OpenOnce(std::unique_ptr<Work>& work, Given&&... given) {
  static std::mutex mutex;
  static std::string wrong;
  const std::lock_guard<std::mutex> lock(mutex);
  if (work != nullptr) return nullptr;
  CudaCalls calls{};
  wrong = OpenCuda(&calls);
  if (!wrong.empty()) return wrong.c_str();
  work = std::make_unique<Work>(calls, std::forward<Given>(given)...);
  return nullptr;
}

}  // namespace moe_edge
