// Attention with gradients behind JAX's foreign function interface; ends kernels.cc.

namespace moe_edge {

// What both calls of attention are told: heads of queries q [R, S, P], of keys or values
// [C, S, P] and turned around [C, P, padded], and of weights [R, S, padded].
template <class Q, class K, class T, class W>
std::string AttendShapes(const Q& q, const K& k, const T& turned, const W& weights,
                         TrainAttendArgs* a) {
  const auto qs = q.dimensions(), ks = k.dimensions(), ts = turned.dimensions();
  const auto ws = weights.dimensions();
  if (qs.size() != 3 || ks.size() != 3 || ts.size() != 3 || ws.size() != 3) {
    return "expected q [R, S, P], k [C, S, P], turned [C, P, padded], weights [R, S, padded]";
  }
  const int64_t R = qs[0], S = qs[1], P = qs[2], C = ks[0], padded = ts[2];
  if (R == 0 || C == 0 || R % C != 0 || ks[1] != S || ks[2] != P || ts[0] != C || ts[1] != P ||
      ws[0] != R || ws[1] != S || ws[2] != padded) {
    return "shapes of q, k, turned and weights do not fit";
  }
  if (P % 16 != 0 || padded != Blocks(int(S), 16) * 16 || S > INT32_MAX / 2 || P > INT32_MAX) {
    return "heads are no whole vectors of 16, or keys not padded to such";
  }
  a->S = int(S), a->P = int(P), a->Q = int(R / C), a->padded = int(padded);
  return "";
}

ffi::Error TrainAttendCall(F32 q, F32 v, F32 turned, ffi::Buffer<ffi::S32> window,
                           ffi::ResultBuffer<ffi::F32> y,
                           ffi::ResultBuffer<ffi::F32> weights, float scale) {
  TrainAttendArgs a{};
  const std::string wrong = AttendShapes(q, v, turned, *weights, &a);
  if (!wrong.empty()) return Refuse("train_attend: " + wrong);
  if (y->element_count() != q.element_count() || window.element_count() != 1) {
    return Refuse("train_attend: shapes of y or window do not fit");
  }
  a.q = q.typed_data(), a.v = v.typed_data(), a.turned = turned.typed_data();
  a.weights = weights->typed_data(), a.y = y->typed_data();
  a.window = std::max(window.typed_data()[0], 1), a.scale = scale;
  const int blocks = Blocks(a.S, kGradientRows);
  const TrainAttendKernels& kernels = *Best().train_attend;
  const int chunks[] = {int(q.dimensions()[0]) * blocks};
  Team::Get().Run(chunks, [&](int, int item, int) {
    kernels.attend(a, item / blocks, item % blocks);
  });
  return ffi::Error::Success();
}

ffi::Error TrainAttendBackCall(F32 q, F32 k, F32 turned, F32 weights, F32 dy,
                               ffi::ResultBuffer<ffi::F32> dq,
                               ffi::ResultBuffer<ffi::F32> dk,
                               ffi::ResultBuffer<ffi::F32> dv,
                               ffi::ResultBuffer<ffi::F32> dscores, float scale) {
  TrainAttendArgs a{};
  const std::string wrong = AttendShapes(q, k, turned, weights, &a);
  if (!wrong.empty()) return Refuse("train_attend_back: " + wrong);
  if (dy.element_count() != q.element_count() || dq->element_count() != q.element_count() ||
      dk->element_count() != k.element_count() || dv->element_count() != k.element_count() ||
      dscores->element_count() != weights.element_count()) {
    return Refuse("train_attend_back: shapes of gradients do not fit");
  }
  a.q = q.typed_data(), a.k = k.typed_data(), a.turned = turned.typed_data();
  a.weights = weights.typed_data(), a.dy = dy.typed_data(), a.scale = scale;
  a.dscores = dscores->typed_data(), a.dq = dq->typed_data();
  a.dk = dk->typed_data(), a.dv = dv->typed_data();
  const int blocks = Blocks(a.S, kGradientRows);
  const TrainAttendKernels& kernels = *Best().train_attend;
  const int chunks[] = {int(q.dimensions()[0]) * blocks, int(k.dimensions()[0]) * blocks};
  Team::Get().Run(chunks, [&](int phase, int item, int) {
    (phase == 0 ? kernels.queries : kernels.keys)(a, item / blocks, item % blocks);
  });
  return ffi::Error::Success();
}

}  // namespace moe_edge

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_train_attend, moe_edge::TrainAttendCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::F32>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_train_attend_back, moe_edge::TrainAttendBackCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Attr<float>("scale"));

}  // extern "C"
#pragma GCC visibility pop
