// The kernels for many tokens behind JAX's foreign function interface.

namespace moe_edge {

// Runs of small experts that a member gets: the last one ends soon enough, and handing
// one out costs little beside it.
constexpr int kRuns = 16;

struct Placed {
  std::vector<int32_t> place, token, next;  // of pairs, of places, of experts
};

// Pairs in order of expert, then of token: the order of `model/expert_blocks.py`.
// Returns what is wrong with an id, or nothing.
std::string PlacePairs(const int32_t* ids, int pairs, int K, int E, Placed* p) {
  p->next.assign(size_t(E) + 1, 0);
  for (int n = 0; n < pairs; ++n) {
    if (ids[n] < 0) return "expert id " + std::to_string(ids[n]) + " is below 0";
    if (ids[n] < E) ++p->next[ids[n] + 1];
  }
  for (int e = 0; e < E; ++e) p->next[e + 1] += p->next[e];
  p->place.assign(pairs, -1);
  p->token.resize(pairs);
  for (int n = 0; n < pairs; ++n) {
    if (ids[n] >= E) continue;
    p->place[n] = p->next[ids[n]]++;
    p->token[p->place[n]] = n / K;
  }
  return "";  // next[e] is now the end of expert e's pairs
}

// The calling thread's, for rows of a width.
BlockRoom* RoomFor(int width) {
  static thread_local BlockRoom room;
  static thread_local std::vector<float> rows;
  const size_t wanted = size_t(kGroupRows) * Padded(width) + 16;
  if (rows.size() < wanted) rows.resize(wanted);
  const auto at = reinterpret_cast<uintptr_t>(rows.data());
  room.rows = reinterpret_cast<float*>((at + 63) / 64 * 64);
  return &room;
}

// x whose rows have whole vectors' width; they are copied only if need be.
const float* PaddedRows(const float* x, int T, int width) {
  static thread_local std::vector<float> copy;
  const size_t padded = Padded(width);
  if (padded == size_t(width)) return x;
  copy.assign(T * padded, 0.0f);
  for (int t = 0; t < T; ++t) std::copy_n(x + size_t(t) * width, width, &copy[t * padded]);
  return copy.data();
}

void RunProduct(LinearArgs a) {
  const BlockKernels& kernels = *Best().blocks;
  a.x = PaddedRows(a.x, a.T, a.I);
  const int chunks[] = {Blocks(a.O, kBlockRows) * Blocks(a.T, kBlockVectors)};
  Team::Get().Run(chunks, [&](int, int item, int) {
    kernels.product(a, RoomFor(a.I), item);
  });
}

void RunSum(const BlockSumArgs& a) {
  const BlockKernels& kernels = *Best().blocks;
  Team& team = Team::Get();
  const int chunks[] = {team.Chunks(double(sizeof(float)) * a.T * a.K * a.D)};
  team.Run(chunks, [&](int, int chunk, int count) { kernels.sum(a, chunk, count); });
}

// The outputs of all pairs whose expert has a record, and with `sum` the tokens' sums.
// slot [E]: the record of each expert, S or more: none; null: expert e's is e.
std::string RunBlocks(BlockArgs a, const int32_t* ids, int T, int K, int E,
                      const uint8_t* records, const int32_t* slot, int S,
                      BlockSumArgs* sum) {
  static thread_local Placed p;
  static thread_local std::vector<BlockGroup> groups;
  std::string wrong = PlacePairs(ids, T * K, K, E, &p);
  if (!wrong.empty()) return wrong;
  groups.clear();
  for (int e = 0, first = 0; e < E; first = p.next[e++]) {
    const int at = slot == nullptr ? e : slot[e];
    if (p.next[e] == first || at >= S) continue;
    if (at < 0) return "slot " + std::to_string(at) + " of an expert is below 0";
    groups.push_back({records + size_t(at) * a.layout.record_bytes, first, p.next[e]});
  }
  const int D = a.layout.D, F = a.layout.F, count = int(groups.size());
  int pairs = 0, most = 0;
  for (const BlockGroup& group : groups) {
    pairs += group.end - group.first;
    most = std::max(most, group.end - group.first);
  }
  a.x = PaddedRows(a.x, T, D);
  a.groups = groups.data(), a.count = count, a.token = p.token.data();
  Team& team = Team::Get();
  int sums = 0;
  if (sum != nullptr) {
    sum->place = p.place.data();
    sums = team.Chunks(double(sizeof(float)) * T * K * D);
  }
  const BlockKernels& kernels = *Best().blocks;
  // Small experts as wholes, if there are some for each thread, and none is more than a
  // thread's share of the work.
  if (F <= kBlockRows && count >= kRuns / 4 * team.size() && most * team.size() <= pairs) {
    const int chunks[] = {std::min(count, kRuns * team.size()), sums};
    team.Run(chunks, [&](int phase, int chunk, int many) {
      if (phase == 0) return kernels.whole(a, RoomFor(std::max(D, F)), chunk, many);
      kernels.sum(*sum, chunk, many);
    });
    return "";
  }
  const int chunks[] = {count * Blocks(F, kBlockRows), count * Blocks(D, kBlockRows), sums};
  team.Run(chunks, [&](int phase, int chunk, int many) {
    switch (phase) {
      case 0: return kernels.hidden(a, RoomFor(D), chunk);
      case 1: return kernels.outputs(a, RoomFor(F), chunk);
      default: return kernels.sum(*sum, chunk, many);
    }
  });
  return "";
}

ffi::Error ProductCall(ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                       ffi::ResultBuffer<ffi::F32> y) {
  LinearArgs a;
  const std::string wrong = LinearArgsOf(x, w, y, &a);
  if (!wrong.empty()) return Refuse("product: " + wrong);
  RunProduct(a);
  return ffi::Error::Success();
}

// Common to the next two; what is wrong, or nothing.
std::string BlockArgsOf(const ffi::Buffer<ffi::F32>& x, const ffi::Buffer<ffi::S32>& ids,
                        const ffi::AnyBuffer& records, const ffi::Buffer<ffi::F32>& hidden,
                        int64_t expert_dim, bool has_bias, int64_t activation, float limit,
                        int64_t kind, BlockArgs* a) {
  const auto xs = x.dimensions(), is = ids.dimensions(), rs = records.dimensions();
  if (xs.size() != 2 || is.size() != 2 || rs.size() != 2 || is[0] != xs[0]) {
    return "expected x [T, D], ids [T, K], records [E, R]";
  }
  const int64_t F = expert_dim, pairs = is[0] * is[1];
  const std::string misfit =
      LayoutOf(records, xs[1], F, has_bias, activation, limit, kind, &a->layout);
  if (!misfit.empty()) return misfit;
  if (int64_t(hidden.element_count()) != pairs * Padded(int(F))) {
    return "the room for hidden values is not [T * K, F] with F in whole vectors";
  }
  a->x = x.typed_data(), a->hidden = const_cast<float*>(hidden.typed_data());
  return "";
}

// Of the calls `blocks` and `train`; `saved`: as of BlockArgs.
ffi::Error WholeSum(const std::string& name, const ffi::Buffer<ffi::F32>& x,
                    const ffi::Buffer<ffi::S32>& ids, const ffi::Buffer<ffi::F32>& weights,
                    const ffi::AnyBuffer& records, ffi::Buffer<ffi::F32>& y,
                    ffi::Buffer<ffi::F32>& hidden, ffi::Buffer<ffi::F32>& outputs,
                    float* saved, int64_t expert_dim, bool has_bias, int64_t activation,
                    float limit, int64_t kind) {
  BlockArgs a{};
  std::string wrong = BlockArgsOf(x, ids, records, hidden, expert_dim, has_bias,
                                  activation, limit, kind, &a);
  if (!wrong.empty()) return Refuse(name + ": " + wrong);
  const int T = int(x.dimensions()[0]), K = int(ids.dimensions()[1]), D = a.layout.D;
  if (weights.element_count() != size_t(T) * K || y.element_count() != size_t(T) * D ||
      outputs.element_count() != size_t(T) * K * D) {
    return Refuse(name + ": shapes of weights, outputs or y do not fit");
  }
  a.outputs = outputs.typed_data(), a.saved = saved;
  BlockSumArgs sum{a.outputs, weights.typed_data(), nullptr, y.typed_data(), T, K, D};
  const int E = int(records.dimensions()[0]);
  const auto* each = static_cast<const uint8_t*>(records.untyped_data());
  wrong = RunBlocks(a, ids.typed_data(), T, K, E, each, nullptr, E, &sum);
  return wrong.empty() ? ffi::Error::Success() : Refuse(name + ": " + wrong);
}

ffi::Error BlocksCall(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> ids,
                      ffi::Buffer<ffi::F32> weights, ffi::AnyBuffer records,
                      ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::F32> hidden,
                      ffi::ResultBuffer<ffi::F32> outputs, int64_t expert_dim,
                      bool has_bias, int64_t activation, float limit, int64_t kind) {
  return WholeSum("blocks", x, ids, weights, records, *y, *hidden, *outputs, nullptr,
                  expert_dim, has_bias, activation, limit, kind);
}

ffi::Error FillCall(ffi::Buffer<ffi::F32> outputs, ffi::Buffer<ffi::F32> x,
                    ffi::Buffer<ffi::S32> ids, ffi::AnyBuffer records,
                    ffi::Buffer<ffi::S32> slot, ffi::ResultBuffer<ffi::F32> filled,
                    ffi::ResultBuffer<ffi::F32> hidden, int64_t expert_dim, bool has_bias,
                    int64_t activation, float limit, int64_t kind) {
  BlockArgs a{};
  std::string wrong = BlockArgsOf(x, ids, records, *hidden, expert_dim, has_bias,
                                  activation, limit, kind, &a);
  if (!wrong.empty()) return Refuse("fill: " + wrong);
  const int T = int(x.dimensions()[0]), K = int(ids.dimensions()[1]);
  if (filled->element_count() < size_t(T) * K * a.layout.D) {
    return Refuse("fill: outputs have fewer rows than there are pairs");
  }
  if (filled->typed_data() != outputs.typed_data()) {
    return Refuse("fill: outputs are to be written in place");
  }
  a.outputs = filled->typed_data();
  const int E = int(slot.element_count()), S = int(records.dimensions()[0]);
  const auto* each = static_cast<const uint8_t*>(records.untyped_data());
  wrong = RunBlocks(a, ids.typed_data(), T, K, E, each, slot.typed_data(), S, nullptr);
  return wrong.empty() ? ffi::Error::Success() : Refuse("fill: " + wrong);
}

ffi::Error SumCall(ffi::Buffer<ffi::F32> outputs, ffi::Buffer<ffi::S32> ids,
                   ffi::Buffer<ffi::F32> weights, ffi::ResultBuffer<ffi::F32> y,
                   int64_t experts) {
  const auto is = ids.dimensions(), os = outputs.dimensions(), ys = y->dimensions();
  if (is.size() != 2 || os.size() != 2 || ys.size() != 2 || ys[0] != is[0] ||
      ys[1] != os[1] || os[0] < is[0] * is[1] || experts < 0 || experts > INT32_MAX ||
      int64_t(weights.element_count()) != is[0] * is[1]) {
    return Refuse("sum: expected outputs [T * K or more, D], ids, weights [T, K], y [T, D]");
  }
  static thread_local Placed p;
  const int T = int(is[0]), K = int(is[1]);
  const std::string wrong = PlacePairs(ids.typed_data(), T * K, K, int(experts), &p);
  if (!wrong.empty()) return Refuse("sum: " + wrong);
  RunSum({outputs.typed_data(), weights.typed_data(), p.place.data(), y->typed_data(), T, K,
          int(os[1])});
  return ffi::Error::Success();
}

// A call's binding that ends with the layout of its records.
template <class Binding>
auto WithLayout(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("expert_dim")
      .template Attr<bool>("has_bias")
      .template Attr<int64_t>("activation")
      .template Attr<float>("limit")
      .template Attr<int64_t>("kind");
}

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

}  // namespace moe_edge

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_product, moe_edge::ProductCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<moe_edge::F32>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<moe_edge::F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_blocks, moe_edge::BlocksCall,
                              moe_edge::WithLayout(xla::ffi::Ffi::Bind()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::S32>()
                                  .Arg<moe_edge::F32>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_fill, moe_edge::FillCall,
                              moe_edge::WithLayout(xla::ffi::Ffi::Bind()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::S32>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<moe_edge::S32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_sum, moe_edge::SumCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::S32>()
                                  .Arg<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Attr<int64_t>("experts"));

}  // extern "C"
#pragma GCC visibility pop
