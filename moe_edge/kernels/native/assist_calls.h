// START and WAIT of experts that the host computes while a device's program goes on,
// behind JAX's foreign function interface; included by kernels.cc, behind prefetch_calls.h.
//
// On a stream of our own: the states and the list go into pinned memory, a function of the
// host computes the list's experts where their records lie, and the rows go back. A
// stream waits for a function that it was given, so nobody polls a flag, and no thread of
// the host waits for the device.

#include <atomic>
#include <set>
#include <tuple>

#include "cuda_shim.h"
#include "side_stream.h"

namespace moe_edge {

class Assister : public SideStream {
 public:
  using SideStream::SideStream;

  // a: whose x, ids and y are the device's.
  std::string Start(void* compute, const ExpertArgs& a, bool int8) {
    if (is_wrong_.exchange(false)) return "the host was given an expert id below 0";
    return Begin(compute, a.y, a.ids, [&](Device& device) {
      const size_t pairs = size_t(a.T) * a.K, row = sizeof(float) * a.layout.D;
      const size_t states = row * a.T, list = sizeof(int32_t) * pairs;
      Job* job = JobOf(device, a, int8);
      if (job == nullptr) return false;
      const auto address = [](const void* at) { return reinterpret_cast<uint64_t>(at); };
      void* stream = device.stream;
      return Done("cuMemcpyDtoHAsync",
                  calls_.copy_down(const_cast<float*>(job->a.x), address(a.x), states,
                                   stream)) &&
             Done("cuMemcpyDtoHAsync",
                  calls_.copy_down(const_cast<int32_t*>(job->a.ids), address(a.ids), list,
                                   stream)) &&
             Done("cuLaunchHostFunc", calls_.call_host(stream, &Job::Run, job)) &&
             Done("cuMemcpyHtoDAsync",
                  calls_.copy_up(address(a.y), job->a.y, row * pairs, stream));
    });
  }

 private:
  // What the host computes of a layer, the same in each step: only what lies in the room
  // changes.
  struct Job {
    ExpertArgs a;
    bool int8;
    std::atomic<bool>* is_wrong;

    // It takes no lock that a caller of the driver may hold.
    static void Run(void* given) {
      auto* job = static_cast<Job*>(given);
      ExpertArgs a = job->a;
      if (job->int8) {
        a.int8 = &BestRounded(), a.rounded = RoundedRowsOf(a.x, a.T, a.layout.D);
      }
      if (!RunExperts(a).empty()) *job->is_wrong = true;
      if (shim::Noted().wanted) {
        std::set<int32_t> experts(a.ids, a.ids + size_t(a.T) * a.K);
        experts.erase(experts.lower_bound(a.E), experts.end());
        shim::Noted().Add("computed " + std::to_string(experts.size()) + " experts");
      }
    }
  };
  using Key = std::tuple<const Device*, const void*, int, int, int, int, int, bool,
                         Activation, float, Kind, bool>;

  // Null: it failed. Work on a stream is in turn, so all jobs of a device share a room;
  // one that became too small stays, as work may be under way in it.
  Job* JobOf(Device& device, const ExpertArgs& a, bool int8) {
    const size_t states = sizeof(float) * a.T * a.layout.D;
    const size_t pairs = size_t(a.T) * a.K;
    const size_t list = (sizeof(int32_t) * pairs + 63) / 64 * 64;
    const size_t bytes = (states + 63) / 64 * 64 + list + states * a.K;
    const ExpertLayout& of = a.layout;
    std::unique_ptr<Job>& job =
        jobs_[{&device, a.records, a.T, a.K, a.E, of.D, of.F, of.has_bias, of.activation,
               of.limit, of.kind, int8}];
    if (job != nullptr) return job.get();
    if (bytes > device.room_bytes) {
      constexpr unsigned portable = 1;
      void* room = nullptr;
      if (!Done("cuMemHostAlloc", calls_.allocate(&room, bytes, portable))) return nullptr;
      device.room = static_cast<char*>(room), device.room_bytes = bytes;
    }
    job = std::make_unique<Job>(Job{a, int8, &is_wrong_});
    char* at = device.room;
    job->a.x = reinterpret_cast<float*>(at), at += (states + 63) / 64 * 64;
    job->a.ids = reinterpret_cast<int32_t*>(at), at += list;
    job->a.y = reinterpret_cast<float*>(at);
    return job.get();
  }

  std::map<Key, std::unique_ptr<Job>> jobs_;
  std::atomic<bool> is_wrong_{false};
};

Assister& AssistOnHost() {
  static Assister assister(shim::Calls<shim::kAssist>());
  return assister;
}

std::unique_ptr<Assister>& AssistOnGpu() {
  static std::unique_ptr<Assister> assister;
  return assister;
}

using LayoutAttr = ffi::Span<const int64_t>;

// layout: expert_dim, has_bias, activation, kind, int8.
ffi::Error StartAssist(Assister* assister, void* stream, const ffi::Buffer<ffi::S32>& ids,
                       const ffi::Buffer<ffi::F32>& x, const ffi::AnyBuffer& host,
                       ffi::ResultBuffer<ffi::F32>& rows, LayoutAttr layout, float limit) {
  if (assister == nullptr) return Refuse("assist: CUDA's driver was not opened");
  const auto is = ids.dimensions(), xs = x.dimensions(), hs = host.dimensions();
  const auto rs = rows->dimensions();
  if (is.size() != 2 || xs.size() != 2 || hs.size() != 2 || rs.size() != 2 ||
      is[0] != xs[0] || rs[0] != is[0] * is[1] || rs[1] != xs[1] || layout.size() != 5) {
    return Refuse("assist: expected ids [T, K], x [T, D], host [E, R], rows [T * K, D]");
  }
  ExpertArgs a{};
  const std::string misfit = LayoutOf(host, xs[1], layout[0], layout[1] != 0, layout[2],
                                      limit, layout[3], &a.layout);
  if (!misfit.empty()) return Refuse("assist: " + misfit);
  a.x = x.typed_data(), a.ids = ids.typed_data(), a.y = rows->typed_data();
  a.records = static_cast<const uint8_t*>(host.untyped_data());
  a.T = int(is[0]), a.K = int(is[1]), a.E = int(hs[0]), a.rows = true;
  const bool int8 = layout[4] != 0 && MeetsRounded(a.layout.kind);
  const std::string wrong = assister->Start(stream, a, int8);
  return wrong.empty() ? ffi::Error::Success() : Refuse("assist: " + wrong);
}

ffi::Error WaitAssist(Assister* assister, void* stream, const ffi::AnyBuffer& rows,
                      const ffi::AnyBuffer& ids) {
  if (assister == nullptr) return Refuse("assist: CUDA's driver was not opened");
  const std::string wrong =
      assister->Wait(stream, rows.untyped_data(), ids.untyped_data());
  return wrong.empty() ? ffi::Error::Success() : Refuse("assist: " + wrong);
}

ffi::Error HostStartAssist(ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> x,
                           ffi::AnyBuffer host, ffi::RemainingArgs,
                           ffi::ResultBuffer<ffi::F32> rows, ffi::RemainingRets,
                           LayoutAttr layout, float limit) {
  return StartAssist(&AssistOnHost(), &shim::Compute(), ids, x, host, rows, layout, limit);
}

ffi::Error HostWaitAssist(ffi::AnyBuffer rows, ffi::AnyBuffer ids, ffi::RemainingArgs,
                          ffi::RemainingRets) {
  return WaitAssist(&AssistOnHost(), &shim::Compute(), rows, ids);
}

ffi::Error GpuStartAssist(void* stream, ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> x,
                          ffi::AnyBuffer host, ffi::RemainingArgs,
                          ffi::ResultBuffer<ffi::F32> rows, ffi::RemainingRets,
                          LayoutAttr layout, float limit) {
  Assister* assister = AssistOnGpu().get();
  return StartAssist(assister, stream, ids, x, host, rows, layout, limit);
}

ffi::Error GpuWaitAssist(void* stream, ffi::AnyBuffer rows, ffi::AnyBuffer ids,
                         ffi::RemainingArgs, ffi::RemainingRets) {
  return WaitAssist(AssistOnGpu().get(), stream, rows, ids);
}

template <class Begun>
auto AsStartAssist(Begun begun) {
  return std::move(begun)
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::F32>>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::Buffer<ffi::F32>>()
      .RemainingRets()
      .template Attr<LayoutAttr>("layout")
      .template Attr<float>("limit");
}

template <class Begun>
auto AsWaitAssist(Begun begun) {
  return std::move(begun)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace moe_edge

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_assist_start, moe_edge::HostStartAssist,
                              moe_edge::AsStartAssist(xla::ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_assist_wait, moe_edge::HostWaitAssist,
                              moe_edge::AsWaitAssist(xla::ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_assist_start_cuda, moe_edge::GpuStartAssist,
                              moe_edge::AsStartAssist(moe_edge::OnStream()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_assist_wait_cuda, moe_edge::GpuWaitAssist,
                              moe_edge::AsWaitAssist(moe_edge::OnStream()));

// See `OpenOnce`.
const char* moe_edge_assist_open() {
  return moe_edge::OpenOnce(moe_edge::AssistOnGpu());
}

}  // extern "C"
#pragma GCC visibility pop
