// The kernels behind JAX's foreign function interface and, for NumPy, behind C.

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "blocks.h"
#include "delta.h"
#include "gradients.h"
#include "sets.h"
#include "team.h"
#include "types.h"
#include "xla/ffi/api/ffi.h"

namespace moe_edge {

// Those that this processor can run, the best first; null: the end.
const Kernels* const* Available() {
  static const Kernels* found[4] = {};
  static const bool done = [] {
    int count = 0;
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") &&
                          __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (has_avx2 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      found[count++] = &avx512::kKernels;
    }
    if (has_avx2) found[count++] = &avx2::kKernels;
#endif
    found[count] = &portable::kKernels;
    return true;
  }();
  (void)done;
  return found;
}

std::atomic<const Kernels*>& Chosen() {
  static std::atomic<const Kernels*> chosen{Available()[0]};
  return chosen;
}

const Kernels& Best() { return *Chosen().load(std::memory_order_relaxed); }

// Of the chosen instructions, those that multiply bytes.
const RoundedKernels& BestRounded() {
#if defined(__x86_64__)
  if (&Best() == &avx512::kKernels && __builtin_cpu_supports("avx512vnni")) {
    return vnni::kRounded;
  }
  if (&Best() != &portable::kKernels) return avx2::kRounded;
#endif
  return portable::kRounded;
}

// The calling thread's rows x [T, width], rounded.
const Rounded* RoundedRowsOf(const float* x, int T, int width) {
  static thread_local RoundedRoom room;
  static thread_local std::vector<const float*> rows;
  rows.resize(T);
  for (int t = 0; t < T; ++t) rows[t] = x + size_t(t) * width;
  return room.Round(BestRounded(), rows.data(), T, width);
}

// Several matrices that meet the same vectors, as if their rows stood below each other.
void RunLinear(const LinearArgs* parts, size_t count) {
  const Kernels& kernels = Best();
  Team& team = Team::Get();
  long rows = 0;
  double bytes = 0;
  for (size_t n = 0; n < count; ++n) {
    rows += parts[n].O;
    bytes += double(RowBytes(parts[n].kind, parts[n].I)) * parts[n].O;
  }
  const int chunks[] = {team.Chunks(bytes)};
  team.Run(chunks, [&](int, int chunk, int many) {
    long first, last;
    Share(rows, 16, chunk, many, &first, &last);
    for (size_t n = 0; n < count && last > 0; ++n) {
      const long end = std::min<long>(last, parts[n].O);
      if (first < end) kernels.linear(parts[n], first, end);
      first = std::max<long>(0, first - parts[n].O), last -= parts[n].O;
    }
  });
}

void RunNorm(const NormArgs& a) {
  const Kernels& kernels = Best();
  Team& team = Team::Get();
  const int most = team.Chunks(double(sizeof(float)) * a.T * a.D);
  const int chunks[] = {std::clamp(a.T, 1, most)};
  team.Run(chunks, [&](int, int chunk, int count) { kernels.norm(a, chunk, count); });
}

void RunTopK(const TopKArgs& a) {
  const Kernels& kernels = Best();
  Team& team = Team::Get();
  const int chunks[] = {team.Chunks(double(sizeof(float)) * a.T * a.E)};
  team.Run(chunks, [&](int, int chunk, int count) { kernels.top_k(a, chunk, count); });
}

int AttendChunks(const AttendArgs& a) {
  double positions = 0;
  for (int b = 0; b < a.B; ++b) {
    positions += std::min(std::min(a.start[b], a.M) + a.S, a.window);
  }
  const long passes = (long(a.S) * a.Q + a.tile - 1) / a.tile, items = a.B * a.G * passes;
  const double row = double(RowBytes(a.cache, a.P)) + double(RowBytes(a.cache, a.W));
  const double bytes = positions * passes * a.G * row;
  return int(std::min<long>(Team::Get().Chunks(bytes), items));
}

void RunAttend(const AttendArgs& a) {
  const Kernels& kernels = Best();
  const int chunks[] = {AttendChunks(a)};
  Team::Get().Run(chunks, [&](int, int chunk, int count) { kernels.attend(a, chunk, count); });
}

// Memory that a thread's calls share, so that none allocates.
struct Scratch {
  std::vector<int32_t> expert, first, order, place, count;
  std::vector<float> hidden, outputs;
};

// Returns what is wrong with an id, or nothing.
std::string RunExperts(const ExpertArgs& a) {
  static thread_local Scratch s;
  const int pairs = a.T * a.K;
  s.count.assign(size_t(a.E) + 1, 0);
  for (int p = 0; p < pairs; ++p) {
    if (a.ids[p] < 0) return "expert id " + std::to_string(a.ids[p]) + " is below 0";
    if (a.ids[p] < a.E) ++s.count[a.ids[p]];
  }
  s.expert.clear();
  s.first.assign(1, 0);
  s.place.assign(pairs, -1);
  // Experts in the order in which the tokens name them.
  for (int p = 0; p < pairs; ++p) {
    const int id = a.ids[p];
    if (id >= a.E || s.count[id] == 0) continue;
    s.expert.push_back(id);
    s.first.push_back(s.first.back() + s.count[id]);
    s.count[id] = 0;
  }
  const int real = s.first.back();
  s.order.resize(real);
  for (size_t g = 0; g < s.expert.size(); ++g) s.count[s.expert[g]] = s.first[g];
  for (int p = 0; p < pairs; ++p) {
    if (a.ids[p] >= a.E) continue;
    s.place[p] = s.count[a.ids[p]]++;
    s.order[s.place[p]] = p;
  }
  const size_t D = a.layout.D, F = a.layout.F;
  if (s.hidden.size() < real * F) s.hidden.resize(real * F);
  if (s.outputs.size() < real * D) s.outputs.resize(real * D);
  const Groups groups{s.expert.data(), s.first.data(), s.order.data(), s.place.data(),
                      int(s.expert.size()), real};
  const Kernels& kernels = Best();
  Team& team = Team::Get();
  const double bytes = double(a.layout.record_bytes) * groups.count;
  float *hidden = s.hidden.data(), *outputs = s.outputs.data();
  const int most = team.Chunks(bytes);
  // Many small experts: their outputs come while their hidden is near. A large one is
  // read faster in long runs of rows, unless its decoding takes longer than reading it.
  constexpr size_t kSmall = 256 << 10;  // bytes
  const bool is_small =
      a.layout.record_bytes < kSmall || a.layout.kind == Kind::kMxfp4;
  if (groups.count >= 2 * most && is_small) {
    const int chunks[] = {most, team.Chunks(sizeof(float) * D * real)};
    team.Run(chunks, [&](int phase, int chunk, int count) {
      if (phase == 0) {
        kernels.whole(a, groups, hidden, outputs, chunk, count);
      } else {
        kernels.sum(a, groups, outputs, chunk, count);
      }
    });
  } else {
    const int chunks[] = {team.Chunks(bytes * 2 / 3), team.Chunks(bytes / 3)};
    team.Run(chunks, [&](int phase, int chunk, int count) {
      if (phase == 0) {
        kernels.hidden(a, groups, hidden, chunk, count);
      } else {
        kernels.outputs(a, groups, hidden, outputs, chunk, count);
      }
    });
  }
  return "";
}

namespace ffi = xla::ffi;

bool KindOf(ffi::DataType type, Kind* kind) {
  switch (type) {
    case ffi::DataType::F32: *kind = Kind::kFloat32; return true;
    case ffi::DataType::BF16:
    case ffi::DataType::U16: *kind = Kind::kBfloat16; return true;
    default: return false;
  }
}

// The kind whose rows of so many weights take so many bytes, or eight of whose rows do:
// no two have as many.
bool BlocksOf(int64_t width, int64_t bytes, Kind* kind) {
  for (const Kind each : {Kind::kQ8_0, Kind::kQ4_0, Kind::kMxfp4, Kind::kQ8_0x8,
                          Kind::kQ4_0x8, Kind::kMxfp4x8}) {
    *kind = each;
    const int64_t rows = IsInterleaved(each) ? kEight : 1;
    const int64_t found = rows * int64_t(RowBytes(each, width));
    if (width % kBlock == 0 && found == bytes) return true;
  }
  return false;
}

ffi::Error Refuse(const std::string& text) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "moe_edge kernels: " + text);
}

// The layout of records [E, R] of experts of D x F; what is wrong, or nothing. `kind`
// says what records of bytes are.
std::string LayoutOf(const ffi::AnyBuffer& records, int64_t D, int64_t F, bool has_bias,
                     int64_t activation, float limit, int64_t kind, ExpertLayout* layout) {
  const bool is_bytes = records.element_type() == ffi::DataType::U8;
  if (is_bytes) {
    if (kind < int64_t(Kind::kQ8_0) || kind > int64_t(Kind::kFp8x8)) {
      return "records of bytes with kind " + std::to_string(kind) +
             ", expected 2 (q8_0), 3 (q4_0), 4 (mxfp4), or 5 to 9 (interleaved)";
    }
    layout->kind = static_cast<Kind>(kind);
  } else if (!KindOf(records.element_type(), &layout->kind)) {
    return "unknown type of records";
  }
  const std::string sizes = "D " + std::to_string(D) + ", F " + std::to_string(F);
  const int block = layout->kind == Kind::kFp8x8 ? kFp8Block : kBlock;
  if (is_bytes && (D % block != 0 || F % block != 0)) {
    return sizes + " are no whole blocks of " + std::to_string(block);
  }
  const int64_t R = records.dimensions()[1];
  // Sizes whose product fits 64 bits, and none that a division is by.
  if (D < 1 || D > R || F > R) {
    return "records of " + std::to_string(R) + " values are none of " + sizes;
  }
  const int64_t values = is_bytes ? LeastBytes(layout->kind, D, F, has_bias)
                                  : 3 * D * F + (has_bias ? 2 * F + D : 0);
  if (F < 1 || values > R) {
    return "records of " + std::to_string(R) + (is_bytes ? " bytes" : " values") +
           ", expected " + std::to_string(values) + " for " + sizes;
  }
  if (activation < 0 || activation > 3) return "unknown activation";
  layout->D = int(D), layout->F = int(F), layout->has_bias = has_bias;
  layout->activation = static_cast<Activation>(activation), layout->limit = limit;
  layout->record_bytes = is_bytes ? R : RowBytes(layout->kind, R);
  return "";
}

// What is wrong, or nothing.
std::string LinearArgsOf(const ffi::Buffer<ffi::F32>& x, const ffi::AnyBuffer& w,
                         ffi::ResultBuffer<ffi::F32>& y, LinearArgs* a) {
  const auto xs = x.dimensions(), ws = w.dimensions(), ys = y->dimensions();
  if (xs.size() != 2 || ws.size() != 2 || ys.size() != 2 || xs[1] < 1 ||
      ys[0] != xs[0]) {
    return "shapes do not fit, expected x [T, I], w [O, I], y [T, O]";
  }
  const bool is_bytes = w.element_type() == ffi::DataType::U8;
  if (is_bytes && !BlocksOf(xs[1], ws[1], &a->kind)) {
    return "rows of " + std::to_string(ws[1]) + " bytes are no blocks of " +
           std::to_string(xs[1]) + " weights";
  }
  if (!is_bytes && !KindOf(w.element_type(), &a->kind)) return "unknown type of weights";
  const int64_t rows = IsInterleaved(a->kind) ? kEight * ws[0] : ws[0];
  if (ys[1] != rows || (!is_bytes && xs[1] != ws[1])) {
    return "shapes do not fit, expected x [T, I], w [O, I], y [T, O]";
  }
  a->x = x.typed_data();
  a->w = static_cast<const uint8_t*>(w.untyped_data());
  a->y = y->typed_data();
  a->T = int(xs[0]), a->I = int(xs[1]), a->O = int(rows);
  return "";
}

ffi::Error LinearCall(ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                      ffi::RemainingRets results, bool int8) {
  if (weights.size() < 1 || weights.size() != results.size()) {
    return Refuse("linear: expected as many results as weights");
  }
  std::vector<LinearArgs> parts(weights.size());
  for (size_t n = 0; n < parts.size(); ++n) {
    const auto w = weights.get<ffi::AnyBuffer>(n);
    auto y = results.get<ffi::Buffer<ffi::F32>>(n);
    if (!w.has_value() || !y.has_value()) return Refuse("linear: y is not float32");
    const std::string wrong = LinearArgsOf(x, *w, *y, &parts[n]);
    if (!wrong.empty()) return Refuse("linear: " + wrong);
  }
  if (int8) {
    const Rounded* rounded = nullptr;
    for (LinearArgs& part : parts) {
      if (!MeetsRounded(part.kind)) continue;
      if (rounded == nullptr) rounded = RoundedRowsOf(part.x, part.T, part.I);
      part.rounded = rounded, part.int8 = &BestRounded();
    }
  }
  RunLinear(parts.data(), parts.size());
  return ffi::Error::Success();
}

ffi::Error NormCall(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight,
                    ffi::ResultBuffer<ffi::F32> y, float eps) {
  const auto xs = x.dimensions(), ws = weight.dimensions();
  if (xs.size() != 2 || ws.size() != 1 || xs[1] != ws[0] || xs[1] < 1 ||
      y->dimensions() != xs) {
    return Refuse("norm: shapes do not fit, expected x, y [T, D], weight [D]");
  }
  RunNorm({x.typed_data(), weight.typed_data(), y->typed_data(), int(xs[0]), int(xs[1]),
           eps});
  return ffi::Error::Success();
}

ffi::Error TopKCall(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::S32> ids) {
  const auto xs = x.dimensions(), is = ids->dimensions();
  if (xs.size() != 2 || is.size() != 2 || xs[0] != is[0] || is[1] < 1 || is[1] > xs[1]) {
    return Refuse("top_k: shapes do not fit, expected x [T, E], ids [T, K], K <= E");
  }
  RunTopK({x.typed_data(), ids->typed_data(), int(xs[0]), int(xs[1]), int(is[1])});
  return ffi::Error::Success();
}

// The type of a cache's array and the values in its rows; whether there is one.
bool CacheRows(const ffi::AnyBuffer& cache, Kind* kind, int64_t* width) {
  const auto dims = cache.dimensions();
  if ((dims.size() != 2 && dims.size() != 3) || cache.element_count() == 0) return false;
  *width = dims[dims.size() - 1];
  if (cache.element_type() != ffi::DataType::U8) return KindOf(cache.element_type(), kind);
  const int64_t block = int64_t(RowBytes(Kind::kQ8_0, kBlock));
  const bool is_whole = *width % block == 0;
  *kind = Kind::kQ8_0, *width = *width / block * kBlock;
  return is_whole;
}

// What attends to caches of R heads in all for B rows, one token each; what is wrong, or
// nothing.
std::string CacheOf(const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, int64_t B,
                    const ffi::Buffer<ffi::S32>& start,
                    const ffi::Buffer<ffi::S32>& window, AttendArgs* a) {
  const auto ks = k.dimensions(), vs = v.dimensions();
  const size_t rank = ks.size();
  int64_t P = 0, W = 0;
  Kind of_values;
  if (!CacheRows(k, &a->cache, &P) || !CacheRows(v, &of_values, &W) ||
      of_values != a->cache || vs.size() != rank ||
      !std::equal(vs.begin(), vs.end() - 1, ks.begin())) {
    return "expected caches k [R, M, P] and v [R, M, W], or [M, P] and [M, W], of one type: "
           "float32, uint16 (bfloat16) or uint8 (q8_0)";
  }
  const int64_t R = rank == 3 ? ks[0] : 1;
  if (B < 1 || R % B != 0 || start.element_count() != size_t(B) || window.element_count() != 1) {
    return "shapes of caches, start or window do not fit";
  }
  for (int b = 0; b < B; ++b) {
    if (start.typed_data()[b] < 0) return "a row starts below position 0";
  }
  a->k = static_cast<const uint8_t*>(k.untyped_data());
  a->v = static_cast<const uint8_t*>(v.untyped_data()), a->start = start.typed_data();
  a->B = int(B), a->S = 1, a->G = int(R / B), a->P = int(P), a->W = a->stride = int(W);
  a->M = int(ks[rank - 2]), a->window = window.typed_data()[0];
  return "";
}

template <bool kChunked>
ffi::Error AttendCall(ffi::Buffer<ffi::F32> q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                      ffi::Buffer<ffi::S32> start,
                      ffi::Buffer<ffi::S32> window, ffi::Buffer<ffi::F32> sinks,
                      ffi::ResultBuffer<ffi::F32> y, float scale) {
  const auto qs = q.dimensions(), ys = y->dimensions();
  AttendArgs a{};
  if (qs.size() != 4 || ys.size() != 4 || !std::equal(ys.begin(), ys.end() - 1, qs.begin()) ||
      q.element_count() == 0) {
    return Refuse("attend: expected q [B, S, H, P], y [B, S, H, W]");
  }
  const std::string wrong = CacheOf(k, v, qs[0], start, window, &a);
  if (!wrong.empty()) return Refuse("attend: " + wrong);
  const int64_t H = qs[2], has_sinks = sinks.element_count();
  if (H < 1 || H % a.G != 0 || a.P != qs[3] || a.W != ys[3] ||
      (has_sinks != 0 && has_sinks != H)) {
    return Refuse("attend: shapes of q, k, sinks or y do not fit");
  }
  a.q = q.typed_data(), a.sinks = has_sinks ? sinks.typed_data() : nullptr;
  a.y = y->typed_data(), a.S = int(qs[1]), a.Q = int(H / a.G);
  a.scale = scale, a.chunked = kChunked;
  RunAttend(a);
  return ffi::Error::Success();
}

ffi::Error ExpertsCall(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> ids,
                       ffi::Buffer<ffi::F32> weights, ffi::AnyBuffer records,
                       ffi::Buffer<ffi::F32> start, ffi::ResultBuffer<ffi::F32> y,
                       int64_t expert_dim, bool has_bias, int64_t activation,
                       float limit, bool rows, int64_t kind, bool int8) {
  const auto xs = x.dimensions(), is = ids.dimensions(), rs = records.dimensions();
  ExpertArgs a;
  if (xs.size() != 2 || is.size() != 2 || rs.size() != 2 || is[0] != xs[0]) {
    return Refuse("experts: expected x [T, D], ids [T, K], records [E, R]");
  }
  const int64_t D = xs[1], T = xs[0], K = is[1];
  const std::string misfit =
      LayoutOf(records, D, expert_dim, has_bias, activation, limit, kind, &a.layout);
  if (!misfit.empty()) return Refuse("experts: " + misfit);
  const int64_t sums = rows ? T * K * D : T * D;
  if (int64_t(y->element_count()) != sums ||
      (!rows && (int64_t(start.element_count()) != sums ||
                 int64_t(weights.element_count()) != T * K))) {
    return Refuse("experts: shapes of weights, start or y do not fit");
  }
  a.x = x.typed_data(), a.ids = ids.typed_data(), a.weights = weights.typed_data();
  a.records = static_cast<const uint8_t*>(records.untyped_data());
  a.start = start.typed_data(), a.y = y->typed_data();
  a.T = int(T), a.K = int(K), a.E = int(rs[0]), a.rows = rows;
  if (int8 && MeetsRounded(a.layout.kind)) {
    a.int8 = &BestRounded(), a.rounded = RoundedRowsOf(a.x, a.T, int(D));
  }
  const std::string wrong = RunExperts(a);
  return wrong.empty() ? ffi::Error::Success() : Refuse("experts: " + wrong);
}

}  // namespace moe_edge

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_linear, moe_edge::LinearCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("int8"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_norm, moe_edge::NormCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_top_k, moe_edge::TopKCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());

constexpr auto kAttendBinding = [] {
  return xla::ffi::Ffi::Bind()
      .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
      .Arg<xla::ffi::AnyBuffer>()
      .Arg<xla::ffi::AnyBuffer>()
      .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
      .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
      .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
      .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
      .Attr<float>("scale");
};

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_attend, moe_edge::AttendCall<false>,
                              kAttendBinding());

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_attend_chunked, moe_edge::AttendCall<true>,
                              kAttendBinding());

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_experts, moe_edge::ExpertsCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("expert_dim")
                                  .Attr<bool>("has_bias")
                                  .Attr<int64_t>("activation")
                                  .Attr<float>("limit")
                                  .Attr<bool>("rows")
                                  .Attr<int64_t>("kind")
                                  .Attr<bool>("int8"));

const char* moe_edge_instructions() { return moe_edge::Best().name; }

// Other instructions from the next call on, if the processor has them; 0: it does not.
int moe_edge_use(const char* name) {
  for (auto* each = moe_edge::Available(); *each != nullptr; ++each) {
    if (std::strcmp((*each)->name, name) != 0) continue;
    moe_edge::Chosen().store(*each);
    return 1;
  }
  return 0;
}

// Of what the library was built, see build_id.py.
const char* moe_edge_build_id() { return MOE_EDGE_BUILD_ID; }

// What does not change from call to call of experts anywhere in memory; as in
// kernels/experts_at.py.
struct KeptExperts {
  const uint8_t* const* each;
  float limit;
  int32_t E, D, F, has_bias, activation, kind, int8;
};

// The experts of records anywhere in memory, without a program; what is wrong with an
// id, or null. The text stands until the thread's next call. Of all ids those count that
// are among the `count` taken ones, or all where `taken` is null.
const char* moe_edge_experts_at(const KeptExperts* kept, const float* x,
                                const int32_t* ids, const float* weights, int T, int K,
                                const int32_t* taken, int count, float* y) {
  static thread_local std::string wrong;
  static thread_local std::vector<int32_t> some;
  static thread_local std::vector<uint8_t> is_taken;
  const int D = kept->D, E = kept->E;
  moe_edge::ExpertArgs a{};
  a.layout = {D, kept->F, kept->has_bias != 0,
              static_cast<moe_edge::Activation>(kept->activation), kept->limit,
              static_cast<moe_edge::Kind>(kept->kind), 0};
  a.layout.record_bytes = moe_edge::RowBytes(a.layout.kind, 3 * size_t(D) * kept->F);
  a.x = x, a.ids = ids, a.weights = weights, a.each = kept->each, a.y = y;
  a.T = T, a.K = K, a.E = E;
  if (taken != nullptr) {
    is_taken.assign(E, 0);
    for (int i = 0; i < count; ++i) {
      if (taken[i] >= 0 && taken[i] < E) is_taken[taken[i]] = 1;
    }
    some.assign(ids, ids + size_t(T) * K);
    for (int32_t& id : some) id = id < 0 || (id < E && is_taken[id]) ? id : E;
    a.ids = some.data();
  }
  if (kept->int8 != 0 && moe_edge::MeetsRounded(a.layout.kind)) {
    a.int8 = &moe_edge::BestRounded(), a.rounded = moe_edge::RoundedRowsOf(x, T, D);
  }
  wrong = moe_edge::RunExperts(a);
  return wrong.empty() ? nullptr : wrong.c_str();
}

// Copies bytes from memory to memory: one core does not read as fast as memory gives.
void moe_edge_copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  moe_edge::Team& team = moe_edge::Team::Get();
  const int chunks[] = {team.Chunks(bytes)};
  team.Run(chunks, [&](int, int chunk, int of) {
    long first, last;
    moe_edge::Share(bytes, 4096, chunk, of, &first, &last);
    std::memcpy(to + first, from + first, last - first);
  });
}

int moe_edge_threads() { return moe_edge::Team::Get().size(); }

void moe_edge_resize(int threads) { moe_edge::Team::Get().Resize(threads); }

void moe_edge_spin(int microseconds) { moe_edge::Team::Get().Spin(microseconds); }

}  // extern "C"
#pragma GCC visibility pop

#include "block_calls.h"
#include "gradient_calls.h"
#include "attention_gradient_calls.h"
#include "delta_calls.h"
#include "prefetch_calls.h"
#include "assist_calls.h"
#include "few_calls.h"
#include "step_calls.h"
