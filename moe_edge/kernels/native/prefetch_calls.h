// START and WAIT of a prefetch behind JAX's foreign function interface; included by
// kernels.cc.

#include <memory>

#include "cuda_shim.h"
#include "side_stream.h"

namespace moe_edge {

using shim::Prefetch;

class Prefetcher : public SideStream {
 public:
  Prefetcher(const CudaCalls& calls, std::vector<char> image)
      : SideStream(calls), image_(std::move(image)) {}

  std::string Start(void* compute, Prefetch given) {
    void* arguments[] = {&given};
    return Begin(compute, given.slots, given.plan, [&](Device& device) {
      return Done("cuLaunchKernel",
                  calls_.launch(device.kernel, kBlocks, 1, 1, kThreads, 1, 1, 0,
                                device.stream, arguments, nullptr));
    });
  }

 private:
  // What a few blocks read fills the link, and leaves the others to the products.
  static constexpr unsigned kBlocks = 32, kThreads = 256;

  bool Open(Device& device) override {
    device.kernel = FunctionOf(image_.data(), "moe_edge_prefetch");
    return device.kernel != nullptr;
  }

  const std::vector<char> image_;
};

Prefetcher& OnHost() {
  static Prefetcher prefetcher(shim::Calls<shim::kPrefetch>(), {});
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

// What the calls take behind what `begun` has: nothing on a CPU, the stream on a GPU.
inline auto OnStream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>(); }

template <class Begun>
auto AsStart(Begun begun) {
  return std::move(begun)
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets();
}

template <class Begun>
auto AsWait(Begun begun) {
  return std::move(begun)
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace moe_edge

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_prefetch_start, moe_edge::HostStart,
                              moe_edge::AsStart(xla::ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_prefetch_wait, moe_edge::HostWait,
                              moe_edge::AsWait(xla::ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_prefetch_start_cuda, moe_edge::GpuStart,
                              moe_edge::AsStart(moe_edge::OnStream()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_prefetch_wait_cuda, moe_edge::GpuWait,
                              moe_edge::AsWait(moe_edge::OnStream()));

// For a kernel that NVRTC compiled; see `OpenOnce`.
const char* moe_edge_prefetch_open(const char* image, int64_t bytes) {
  return moe_edge::OpenOnce(moe_edge::OnGpu(), std::vector<char>(image, image + bytes));
}

// How many events the shim has made.
int64_t moe_edge_side_events() { return moe_edge::shim::Events(); }

// What the shim's streams were given since the last call, a line each; notes from now
// on if wanted. The text stands until the next call.
const char* moe_edge_side_watch(int wanted) {
  static std::string text;
  moe_edge::shim::Notes& notes = moe_edge::shim::Noted();
  const std::lock_guard<std::mutex> lock(notes.mutex);
  text = std::move(notes.text);
  notes.text.clear(), notes.wanted = wanted != 0;
  return text.c_str();
}

}  // extern "C"
#pragma GCC visibility pop
