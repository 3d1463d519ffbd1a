// Attention of one token in each row, from products to the heads' values, behind JAX's
// foreign function interface: it writes into the caches; ends kernels.cc.

namespace moe_edge {

using S32 = ffi::Buffer<ffi::S32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;

// Queries of an item such that members end together: a head's bits do not depend on it.
int BalancedTile(int heads, int runs, int members) {
  int best = kTile;
  long least = -1;
  for (int tile = kTile; tile > 1; --tile) {
    const long items = long((heads + tile - 1) / tile) * runs;
    const long longest = (items + members - 1) / members * (2 * tile + 1);
    if (least < 0 || longest < least) best = tile, least = longest;
  }
  return best;
}

// Angles of B rows; what is wrong, or nothing.
std::string RotationOf(const F32& cos, const F32& sin, int64_t B, int64_t width,
                       bool interleaved, Rotation* r) {
  const int64_t count = cos.element_count();
  if (int64_t(sin.element_count()) != count || count % B != 0 || 2 * count > B * width) {
    return "cos and sin are no angles of at most " + std::to_string(width / 2) + " pairs a row";
  }
  *r = {cos.typed_data(), sin.typed_data(), int(count / B), interleaved};
  return "";
}

// Room of the calling thread for queries, and for more.
float* Room(size_t count) {
  static thread_local std::vector<float> room;
  if (room.size() < count) room.resize(count);
  return room.data();
}

template <bool kChunked>
ffi::Error StepCall(F32 q, F32 k, F32 v, ffi::AnyBuffer k_cache, ffi::AnyBuffer v_cache,
                    F32 q_norm, F32 k_norm, F32 cos, F32 sin, S32 start, S32 window,
                    F32 sinks, F32Result y, ffi::Result<ffi::AnyBuffer> k_written,
                    ffi::Result<ffi::AnyBuffer> v_written, float scale, float eps,
                    bool interleaved) {
  const auto qs = q.dimensions(), ys = y->dimensions();
  if (qs.size() != 3 || ys.size() != 3) {
    return Refuse("step: expected q [B, H, P], y [B, H, W]");
  }
  const int64_t B = qs[0], H = qs[1], P = qs[2];
  AttendArgs a{};
  std::string wrong = CacheOf(k_cache, v_cache, B, start, window, &a);
  if (!wrong.empty()) return Refuse("step: " + wrong);
  const int64_t sizes[] = {int64_t(q_norm.element_count()), int64_t(k_norm.element_count()),
                           int64_t(sinks.element_count())};
  if (H < 1 || H % a.G != 0 || a.P != P || ys[0] != B || ys[1] != H || ys[2] != a.W ||
      int64_t(k.element_count()) != B * a.G * P ||
      int64_t(v.element_count()) != B * a.G * a.W || (sizes[0] != 0 && sizes[0] != P) ||
      (sizes[1] != 0 && sizes[1] != P) || (sizes[2] != 0 && sizes[2] != H)) {
    return Refuse("step: shapes of q, k, v, norms, sinks or y do not fit");
  }
  auto* keys = static_cast<uint8_t*>(k_written->untyped_data());
  auto* values = static_cast<uint8_t*>(v_written->untyped_data());
  if (keys != a.k || values != a.v) {
    return Refuse("step: caches are not written in place");
  }
  StepArgs s{q.typed_data(), k.typed_data(), v.typed_data(),
             sizes[0] ? q_norm.typed_data() : nullptr,
             sizes[1] ? k_norm.typed_data() : nullptr, Room(q.element_count()),
             keys, values, a.start};
  wrong = RotationOf(cos, sin, B, P, interleaved, &s.rotation);
  if (!wrong.empty()) return Refuse("step: " + wrong);
  a.q = s.queries, a.y = y->typed_data(), a.Q = int(H / a.G), a.scale = scale;
  a.sinks = sizes[2] ? sinks.typed_data() : nullptr, a.chunked = kChunked;
  s.cache = a.cache, s.B = a.B, s.G = a.G, s.Q = a.Q, s.P = a.P, s.W = a.W, s.M = a.M, s.eps = eps;
  const Kernels& kernels = Best();
  Team& team = Team::Get();
  a.tile = BalancedTile(a.Q, a.B * a.G, team.size());
  const int heads = a.B * a.G;
  const int prepared = team.Chunks(sizeof(float) * double(q.element_count()));
  const int chunks[] = {std::min(prepared, heads), AttendChunks(a)};
  team.Run(chunks, [&](int phase, int chunk, int count) {
    if (phase == 0) {
      kernels.prepare(s, chunk, count);
    } else {
      kernels.attend(a, chunk, count);
    }
  });
  return ffi::Error::Success();
}

ffi::Error LatentCall(F32 q, F32 low, ffi::AnyBuffer cache, F32 norm, ffi::AnyBuffer weights,
                      F32 cos, F32 sin, S32 start, S32 window, F32Result y,
                      ffi::Result<ffi::AnyBuffer> written, float scale, float eps,
                      bool interleaved) {
  const auto qs = q.dimensions(), ls = low.dimensions(), ys = y->dimensions();
  const auto ws = weights.dimensions();
  if (qs.size() != 3 || ls.size() != 2 || ys.size() != 3 || ws.size() != 2) {
    return Refuse("latent: expected q [B, H, nope + rope], low [B, R + rope], weights "
                  "[H * (nope + value), R], y [B, H, value]");
  }
  const int64_t B = qs[0], H = qs[1], R = ws[1], rope = ls[1] - R, nope = qs[2] - rope;
  const int64_t value = ys[2];
  AttendArgs of_cache{};
  LatentArgs a{};
  std::string wrong = CacheOf(cache, cache, B, start, window, &of_cache);
  if (!wrong.empty()) return Refuse("latent: " + wrong);
  if (!KindOf(weights.element_type(), &a.kind)) return Refuse("latent: unknown type of weights");
  if (H < 1 || R < 1 || value < 1 || rope < 0 || nope < 1 || ls[0] != B || ys[0] != B ||
      ys[1] != H || ws[0] != H * (nope + value) || of_cache.G != 1 || of_cache.P != R + rope ||
      int64_t(norm.element_count()) != R) {
    return Refuse("latent: shapes of q, low, cache, norm, weights or y do not fit");
  }
  wrong = RotationOf(cos, sin, B, rope, interleaved, &a.rotation);
  if (wrong.empty() && 2 * a.rotation.half != rope) wrong = "all of the shared key is rotated";
  if (!wrong.empty()) return Refuse("latent: " + wrong);
  if (written->untyped_data() != of_cache.k) {
    return Refuse("latent: the cache is not written in place");
  }
  const size_t pairs = size_t(B * H), width = R + rope;
  a.q = q.typed_data(), a.low = low.typed_data(), a.norm = norm.typed_data();
  a.w = static_cast<const uint8_t*>(weights.untyped_data());
  a.cache = static_cast<uint8_t*>(written->untyped_data()), a.cached = of_cache.cache;
  a.start = of_cache.start, a.y = y->typed_data();
  a.queries = Room(pairs * (width + R)), a.contexts = a.queries + pairs * width;
  a.B = int(B), a.H = int(H), a.R = int(R), a.nope = int(nope), a.rope = int(rope);
  a.value = int(value), a.M = of_cache.M, a.eps = eps;
  const Kernels& kernels = Best();
  Team& team = Team::Get();
  of_cache.q = a.queries, of_cache.y = a.contexts, of_cache.Q = int(H);
  of_cache.W = int(R), of_cache.scale = scale;
  of_cache.tile = BalancedTile(a.H, a.B, team.size());
  const double head = double(RowBytes(a.kind, R));
  const int chunks[] = {std::min(team.Chunks(head * nope * H), a.H), AttendChunks(of_cache),
                        std::min(team.Chunks(head * value * H), a.H)};
  team.Run(chunks, [&](int phase, int chunk, int count) {
    if (phase == 1) {
      kernels.attend(of_cache, chunk, count);
    } else {
      kernels.latent(a, phase == 2, chunk, count);
    }
  });
  return ffi::Error::Success();
}

}  // namespace moe_edge

#pragma GCC visibility push(default)
extern "C" {

constexpr auto kStepBinding = [] {
  return xla::ffi::Ffi::Bind()
      .Arg<moe_edge::F32>()  // q, k, v
      .Arg<moe_edge::F32>()
      .Arg<moe_edge::F32>()
      .Arg<xla::ffi::AnyBuffer>()  // caches
      .Arg<xla::ffi::AnyBuffer>()
      .Arg<moe_edge::F32>()  // norms
      .Arg<moe_edge::F32>()
      .Arg<moe_edge::F32>()  // cos, sin
      .Arg<moe_edge::F32>()
      .Arg<moe_edge::S32>()  // start, window
      .Arg<moe_edge::S32>()
      .Arg<moe_edge::F32>()  // sinks
      .Ret<moe_edge::F32>()
      .Ret<xla::ffi::AnyBuffer>()
      .Ret<xla::ffi::AnyBuffer>()
      .Attr<float>("scale")
      .Attr<float>("eps")
      .Attr<bool>("interleaved");
};

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_step, moe_edge::StepCall<false>, kStepBinding());

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_step_chunked, moe_edge::StepCall<true>,
                              kStepBinding());

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_latent, moe_edge::LatentCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<moe_edge::F32>()  // q, low
                                  .Arg<moe_edge::F32>()
                                  .Arg<xla::ffi::AnyBuffer>()  // cache
                                  .Arg<moe_edge::F32>()  // norm
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<moe_edge::F32>()  // cos, sin
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::S32>()  // start, window
                                  .Arg<moe_edge::S32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("eps")
                                  .Attr<bool>("interleaved"));

}  // extern "C"
#pragma GCC visibility pop
