// START and WAIT of a prefetch behind JAX's foreign function interface; included by
// kernels.cc. The same code speaks to a GPU's driver and to the host's shim.

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "cuda_shim.h"

namespace moe_edge {

using shim::Prefetch;

class Prefetcher {
 public:
  Prefetcher(const CudaCalls& calls, std::vector<char> image)
      : calls_(calls), image_(std::move(image)) {}

  // Copies on a stream of our own, behind what the compute stream was given so far.
  std::string Start(void* compute, Prefetch given) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Within within(*this, compute);
    Device* device = within.pushed ? DeviceOf(within.context) : nullptr;
    void* done = device == nullptr ? nullptr : EventOf(*device);
    if (done == nullptr) return failed_;
    void* arguments[] = {&given};
    const bool started =
        Done("cuEventRecord", calls_.record(device->begun, compute)) &&
        Done("cuStreamWaitEvent", calls_.wait(device->stream, device->begun, 0)) &&
        Done("cuLaunchKernel",
             calls_.launch(device->copy, kBlocks, 1, 1, kThreads, 1, 1, 0,
                           device->stream, arguments, nullptr)) &&
        Done("cuEventRecord", calls_.record(done, device->stream));
    if (!started) {
      device->events.push_back(done);
      return failed_;
    }
    Forget(flights_.find(given.slots));
    while (flights_.size() >= kMostFlights) {
      Forget(std::min_element(flights_.begin(), flights_.end(), [](auto& a, auto& b) {
        return a.second.number < b.second.number;
      }));
    }
    flights_[given.slots] = {device, done, given.plan, ++started_};
    return failed_;
  }

  // The compute stream goes on behind the copies into these slots.
  std::string Wait(void* compute, const void* slots, const int* plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = flights_.find(slots);
    if (found == flights_.end()) return "waits for slots that nothing was started for";
    const Flight flight = found->second;
    flights_.erase(found);
    if (flight.plan != plan) return "the plan has moved while it was carried out";
    const Within within(*this, compute);
    if (within.pushed) Done("cuStreamWaitEvent", calls_.wait(compute, flight.done, 0));
    flight.device->events.push_back(flight.done);  // what waits has read it
    return failed_;
  }

 private:
  // What a few blocks read fills the link, and leaves the others to the products.
  static constexpr unsigned kBlocks = 32, kThreads = 256;
  // More than running programs can have; each waits for its own before the next layer's.
  static constexpr size_t kMostFlights = 64;

  struct Device {
    void *stream, *begun, *copy;
    std::vector<void*> events;  // that nobody uses
  };

  struct Flight {
    Device* device;
    void* done;
    const int* plan;
    uint64_t number;  // in the order of their beginning
  };
  using Flights = std::map<const void*, Flight>;  // by the slots that they fill

  // The calling thread is in the context of a stream.
  struct Within {
    Within(Prefetcher& owner, void* stream) : owner(owner) {
      owner.failed_.clear();
      pushed = owner.Done("cuStreamGetCtx",
                          owner.calls_.stream_context(stream, &context)) &&
               owner.Done("cuCtxPushCurrent", owner.calls_.push_context(context));
    }
    ~Within() {
      if (pushed) owner.calls_.pop_context(&context);
    }
    Prefetcher& owner;
    void* context = nullptr;
    bool pushed = false;
  };

  // One that nobody has waited for is of a program that failed before it did. Its event
  // may be recorded again: what began since is later on the same stream.
  void Forget(Flights::iterator flight) {
    if (flight == flights_.end()) return;
    flight->second.device->events.push_back(flight->second.done);
    flights_.erase(flight);
  }

  bool Done(const char* what, int status) {
    if (status != 0) failed_ = std::string(what) + " failed: " + std::to_string(status);
    return status == 0;
  }

  // Null: it failed.
  Device* DeviceOf(void* context) {
    std::unique_ptr<Device>& known = devices_[context];
    if (known != nullptr) return known.get();
    constexpr unsigned non_blocking = 1;
    auto device = std::make_unique<Device>();
    void* module = nullptr;
    if (Done("cuModuleLoadData", calls_.load(&module, image_.data())) &&
        Done("cuModuleGetFunction",
             calls_.function(&device->copy, module, "moe_edge_prefetch")) &&
        Done("cuStreamCreate", calls_.create_stream(&device->stream, non_blocking)) &&
        (device->begun = EventOf(*device)) != nullptr) {
      known = std::move(device);
    }
    return known.get();
  }

  // One that nobody uses; null: it failed.
  void* EventOf(Device& device) {
    constexpr unsigned no_timing = 2;
    void* event = nullptr;
    if (device.events.empty()) {
      Done("cuEventCreate", calls_.create_event(&event, no_timing));
    } else {
      event = device.events.back();
      device.events.pop_back();
    }
    return event;
  }

  const CudaCalls calls_;
  const std::vector<char> image_;
  std::mutex mutex_;
  std::string failed_;  // of the call that runs
  std::map<void*, std::unique_ptr<Device>> devices_;  // by context
  Flights flights_;
  uint64_t started_ = 0;
};

Prefetcher& OnHost() {
  static Prefetcher prefetcher(shim::kCalls, {});
  return prefetcher;
}

std::unique_ptr<Prefetcher>& OnGpu() {
  static std::unique_ptr<Prefetcher> prefetcher;
  return prefetcher;
}

ffi::Error StartOn(Prefetcher& prefetcher, void* stream, const ffi::Buffer<ffi::S32>& plan,
                   const ffi::AnyBuffer& slots, const ffi::AnyBuffer& host) {
  const auto ps = plan.dimensions(), ss = slots.dimensions(), hs = host.dimensions();
  if (ps.size() != 2 || ps[0] != 2 || ss.size() != 2 || hs.size() != 2 ||
      ss[1] != hs[1] || slots.element_type() != host.element_type()) {
    return Refuse("prefetch: expected plan [2, P], slots [S, R] and host [E, R] alike");
  }
  const long long bytes = ss[0] == 0 ? 0 : slots.size_bytes() / ss[0];
  const std::string wrong = prefetcher.Start(
      stream, {plan.typed_data(), static_cast<const unsigned char*>(host.untyped_data()),
               static_cast<unsigned char*>(slots.untyped_data()), bytes, int(ps[1]),
               int(hs[0]), int(ss[0])});
  return wrong.empty() ? ffi::Error::Success() : Refuse("prefetch: " + wrong);
}

ffi::Error WaitOn(Prefetcher& prefetcher, void* stream, const ffi::Buffer<ffi::S32>& plan,
                  const ffi::AnyBuffer& slots) {
  const std::string wrong =
      prefetcher.Wait(stream, slots.untyped_data(), plan.typed_data());
  return wrong.empty() ? ffi::Error::Success() : Refuse("prefetch: " + wrong);
}

// What is passed through besides (the arguments that remain) only says what is before
// and what is after.
ffi::Error HostStart(ffi::Buffer<ffi::S32> plan, ffi::AnyBuffer slots,
                     ffi::AnyBuffer host, ffi::RemainingArgs, ffi::RemainingRets) {
  return StartOn(OnHost(), &shim::Compute(), plan, slots, host);
}

ffi::Error HostWait(ffi::Buffer<ffi::S32> plan, ffi::AnyBuffer slots,
                    ffi::RemainingArgs, ffi::RemainingRets) {
  return WaitOn(OnHost(), &shim::Compute(), plan, slots);
}

const char* const kNotOpen = "prefetch: its kernel was not loaded for this GPU";

ffi::Error GpuStart(void* stream, ffi::Buffer<ffi::S32> plan, ffi::AnyBuffer slots,
                    ffi::AnyBuffer host, ffi::RemainingArgs, ffi::RemainingRets) {
  if (OnGpu() == nullptr) return Refuse(kNotOpen);
  return StartOn(*OnGpu(), stream, plan, slots, host);
}

ffi::Error GpuWait(void* stream, ffi::Buffer<ffi::S32> plan, ffi::AnyBuffer slots,
                   ffi::RemainingArgs, ffi::RemainingRets) {
  if (OnGpu() == nullptr) return Refuse(kNotOpen);
  return WaitOn(*OnGpu(), stream, plan, slots);
}

}  // namespace moe_edge

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_prefetch_start, moe_edge::HostStart,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_prefetch_wait, moe_edge::HostWait,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_prefetch_start_cuda, moe_edge::GpuStart,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<void*>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_prefetch_wait_cuda, moe_edge::GpuWait,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<void*>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());

// Opens CUDA's driver for a kernel that NVRTC compiled; what is wrong, or null. The text
// stands until the next call.
const char* moe_edge_prefetch_open(const char* image, int64_t bytes) {
  static std::string wrong;
  moe_edge::CudaCalls calls{};
  wrong = moe_edge::OpenCuda(&calls);
  if (!wrong.empty()) return wrong.c_str();
  moe_edge::OnGpu() = std::make_unique<moe_edge::Prefetcher>(
      calls, std::vector<char>(image, image + bytes));
  return nullptr;
}

// How many events the shim has made.
int64_t moe_edge_prefetch_events() { return moe_edge::shim::Events(); }

// What the shim's streams were given since the last call, a line each; notes from now
// on if wanted. The text stands until the next call.
const char* moe_edge_prefetch_watch(int wanted) {
  static std::string text;
  moe_edge::shim::Notes& notes = moe_edge::shim::Noted();
  const std::lock_guard<std::mutex> lock(notes.mutex);
  text = std::move(notes.text);
  notes.text.clear(), notes.wanted = wanted != 0;
  return text.c_str();
}

}  // extern "C"
#pragma GCC visibility pop
