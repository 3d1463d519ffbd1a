// Steps of delta-nets behind JAX's foreign function interface; included by kernels.cc.

namespace moe_edge {

ffi::Error DeltaCall(ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                     ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::F32> g,
                     ffi::Buffer<ffi::F32> beta, ffi::Buffer<ffi::F32> state,
                     ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::F32> after) {
  const auto qs = q.dimensions(), vs = v.dimensions(), ss = state.dimensions();
  // States of any rank: XLA would copy those of a cache to give them another one.
  if (qs.size() != 2 || k.dimensions() != qs || vs.size() != 2 || vs[0] != qs[0] ||
      ss.size() == 0 || ss.back() != vs[1] || state.element_count() == 0 ||
      state.element_count() != size_t(qs[0] * qs[1] * vs[1]) ||
      g.element_count() != size_t(qs[0]) || beta.element_count() != size_t(qs[0]) ||
      y->dimensions() != vs || after->dimensions() != ss) {
    return Refuse("delta: shapes do not fit, expected q, k [N, K], v, y [N, V], "
                  "g, beta [N], states [..., V] of N x K x V");
  }
  const DeltaArgs a{q.typed_data(),     k.typed_data(),    v.typed_data(),
                    g.typed_data(),     beta.typed_data(), state.typed_data(),
                    y->typed_data(),    after->typed_data(), int(qs[0]),
                    int(qs[1]),         int(vs[1])};
  const Kernels& kernels = Best();
  Team& team = Team::Get();
  const int most = team.Chunks(2.0 * sizeof(float) * a.N * a.K * a.V);
  const int chunks[] = {std::clamp(a.N, 1, most)};
  team.Run(chunks, [&](int, int chunk, int count) { kernels.delta(a, chunk, count); });
  return ffi::Error::Success();
}

}  // namespace moe_edge

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_delta, moe_edge::DeltaCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

}  // extern "C"
#pragma GCC visibility pop
