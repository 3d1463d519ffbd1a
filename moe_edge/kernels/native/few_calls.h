// Products of few rows by our CUDA kernel (few.cu) behind JAX's foreign function
// interface; included by kernels.cc, behind assist_calls.h.
//
// Each is one launch on the program's own stream, and nothing waits for it. XLA keeps
// the call out of its command buffers, as it does with START: the handler asks for
// nothing else, because the first call in a context loads the kernel.

namespace moe_edge {

using shim::Few;

class FewProducts : public Driver {
 public:
  FewProducts(const CudaCalls& calls, std::vector<char> image)
      : Driver(calls), image_(std::move(image)) {}

  std::string Launch(void* stream, Few given, bool is_bfloat16) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Within within(*this, stream);
    void* kernel = within.pushed ? KernelOf(within.context, is_bfloat16) : nullptr;
    if (kernel == nullptr) return failed_;
    const int64_t tasks = shim::few::TasksOf(given);
    const int64_t warps = given.miss_warps + tasks * given.blocks;
    const auto blocks = unsigned((32 * warps + kThreads - 1) / kThreads);
    void* arguments[] = {&given};
    Done("cuLaunchKernel", calls_.launch(kernel, blocks, 1, 1, kThreads, 1, 1, 0, stream,
                                         arguments, nullptr));
    return failed_;
  }

 private:
  static constexpr int kThreads = 128;  // of a block, whose warps know nothing of others

  void* KernelOf(void* context, bool is_bfloat16) {
    void*& known = kernels_[{context, is_bfloat16}];
    if (known == nullptr) {
      known = FunctionOf(image_.data(), is_bfloat16 ? "moe_edge_few_bfloat16"
                                                    : "moe_edge_few_float32");
    }
    return known;
  }

  const std::vector<char> image_;
  std::map<std::pair<void*, bool>, void*> kernels_;  // by context and kind of weights
};

FewProducts& FewOnHost() {
  static FewProducts products(shim::Calls<shim::kFew>(), {});
  return products;
}

std::unique_ptr<FewProducts>& FewOnGpu() {
  static std::unique_ptr<FewProducts> products;
  return products;
}

// The arguments of a product that it may have or not have, in their order.
struct FewOthers {
  ffi::RemainingArgs& given;
  std::string wrong;
  size_t taken = 0;

  template <ffi::DataType type>
  const ffi::NativeType<type>* Take(int64_t size) {
    auto found = given.get<ffi::Buffer<type>>(taken++);
    if (!found.has_value() || int64_t(found->element_count()) != size) {
      wrong = "expected one value a block, or a pair";
      return nullptr;
    }
    return found->typed_data();
  }
};

// numbers: elements of a record before each of two matrices and before their biases (-1:
// none), pairs that share a row of x, activation, warps for what is absent; whether there
// are row, count and pair, absent and host, scale: the other arguments.
ffi::Error FewOn(FewProducts* products, void* stream, const ffi::Buffer<ffi::F32>& x,
                 const ffi::AnyBuffer& slots, const ffi::Buffer<ffi::S32>& record,
                 ffi::RemainingArgs others, ffi::ResultBuffer<ffi::F32>& out,
                 LayoutAttr numbers, float limit) {
  if (products == nullptr) return Refuse("few: its kernel was not loaded for this GPU");
  const auto xs = x.dimensions(), ss = slots.dimensions(), os = out->dimensions();
  const auto type = slots.element_type();
  const bool is_bfloat16 = type == ffi::BF16;
  if (xs.size() != 2 || ss.size() != 2 || os.size() != 2 || numbers.size() != 10 ||
      (!is_bfloat16 && type != ffi::F32)) {
    return Refuse("few: expected x [N, I], float32 or bfloat16 slots [S, R], out [P, O]");
  }
  const int64_t item = is_bfloat16 ? 2 : 4, blocks = int64_t(record.element_count());
  Few a{};
  a.x = x.typed_data(), a.out = out->typed_data(), a.record = record.typed_data();
  a.slots = static_cast<unsigned char*>(slots.untyped_data());
  a.record_bytes = item * ss[1], a.slot_count = int(ss[0]), a.blocks = int(blocks);
  a.width = int(xs[1]), a.outputs = int(os[1]), a.limit = limit;
  for (int matrix = 0; matrix < 2; ++matrix) {
    const int64_t first = numbers[matrix], bias = numbers[2 + matrix];
    if (first + xs[1] * os[1] > ss[1] || bias + os[1] > ss[1]) {
      return Refuse("few: a record is shorter than its parts");
    }
    a.first[matrix] = first < 0 ? -1 : item * first;
    a.bias[matrix] = bias < 0 ? -1 : item * bias;
  }
  a.sharing = int(numbers[4]), a.activation = int(numbers[5]);
  if (numbers[0] < 0 || a.sharing < 1 || xs[0] * a.sharing != os[0] || blocks != os[0]) {
    return Refuse("few: expected out and a block for each pair of a row of x");
  }
  FewOthers next{others, {}};
  if (numbers[7] != 0) {
    a.row = next.Take<ffi::S32>(blocks), a.count = next.Take<ffi::S32>(blocks);
    a.pair = next.Take<ffi::S32>(os[0]);
  }
  if (numbers[8] != 0) {
    a.absent = next.Take<ffi::S32>(blocks), a.miss_warps = int(numbers[6]);
    const auto host = others.get<ffi::AnyBuffer>(next.taken++);
    if (!host.has_value() || host->element_type() != type ||
        host->dimensions().size() != 2 || host->dimensions()[1] != ss[1]) {
      return Refuse("few: expected host [E, R] of the dtype of slots [S, R]");
    }
    a.host = static_cast<const unsigned char*>(host->untyped_data());
    a.host_count = int(host->dimensions()[0]);
  }
  if (numbers[9] != 0) a.scale = next.Take<ffi::F32>(os[0]);
  if (!next.wrong.empty()) return Refuse("few: " + next.wrong);
  if (os[0] == 0 || os[1] == 0) return ffi::Error::Success();
  a.wide = (reinterpret_cast<uintptr_t>(a.x) | reinterpret_cast<uintptr_t>(a.slots) |
            reinterpret_cast<uintptr_t>(a.host) | uintptr_t(a.record_bytes) |
            uintptr_t(item * a.width) | uintptr_t(a.first[0]) |
            uintptr_t(a.first[1] < 0 ? 0 : a.first[1])) % 16 == 0;
  const std::string wrong = products->Launch(stream, a, is_bfloat16);
  return wrong.empty() ? ffi::Error::Success() : Refuse("few: " + wrong);
}

// What is passed through besides (the slots, where experts enter them) is in place.
ffi::Error HostFew(ffi::Buffer<ffi::F32> x, ffi::AnyBuffer slots,
                   ffi::Buffer<ffi::S32> record, ffi::RemainingArgs others,
                   ffi::ResultBuffer<ffi::F32> out, ffi::RemainingRets,
                   LayoutAttr numbers, float limit) {
  return FewOn(&FewOnHost(), &shim::Compute(), x, slots, record, others, out, numbers,
               limit);
}

ffi::Error GpuFew(void* stream, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer slots,
                  ffi::Buffer<ffi::S32> record, ffi::RemainingArgs others,
                  ffi::ResultBuffer<ffi::F32> out, ffi::RemainingRets, LayoutAttr numbers,
                  float limit) {
  return FewOn(FewOnGpu().get(), stream, x, slots, record, others, out, numbers, limit);
}

template <class Begun>
auto AsFew(Begun begun) {
  return std::move(begun)
      .template Arg<ffi::Buffer<ffi::F32>>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .RemainingArgs()
      .template Ret<ffi::Buffer<ffi::F32>>()
      .RemainingRets()
      .template Attr<LayoutAttr>("numbers")
      .template Attr<float>("limit");
}

}  // namespace moe_edge

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_few_product, moe_edge::HostFew,
                              moe_edge::AsFew(xla::ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_few_product_cuda, moe_edge::GpuFew,
                              moe_edge::AsFew(moe_edge::OnStream()));

// For a kernel that NVRTC compiled; see `OpenOnce`.
const char* moe_edge_few_open(const char* image, int64_t bytes) {
  return moe_edge::OpenOnce(moe_edge::FewOnGpu(), std::vector<char>(image, image + bytes));
}

}  // extern "C"
#pragma GCC visibility pop
