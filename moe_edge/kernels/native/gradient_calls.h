// Gradients of products and experts behind JAX's foreign function interface.

namespace moe_edge {

// dx [T, I] of dy [T, O] and rows w [O, I]; dw [O, I] of dy and x [T, I].
ffi::Error ProductBackCall(ffi::Buffer<ffi::F32> dy, ffi::Buffer<ffi::F32> other,
                           ffi::ResultBuffer<ffi::F32> result, bool of_rows) {
  const auto ys = dy.dimensions(), os = other.dimensions(), rs = result->dimensions();
  const int64_t T = ys.size() == 2 ? ys[0] : 0, O = ys.size() == 2 ? ys[1] : 0;
  if (ys.size() != 2 || os.size() != 2 || rs.size() != 2 || os[0] != (of_rows ? T : O) ||
      rs[0] != (of_rows ? O : T) || rs[1] != os[1]) {
    return Refuse("product_back: expected dy [T, O] and w [O, I] or x [T, I]");
  }
  const int64_t I = os[1];
  if (I % 16 != 0) return Refuse("product_back: rows are no whole vectors of 16");
  const GradientKernels& kernels = *Best().gradients;
  const int rows = int(of_rows ? O : T);
  const float *from = dy.typed_data(), *to_add = other.typed_data();
  float* to = result->typed_data();
  const int chunks[] = {Blocks(rows, kGradientRows)};
  Team::Get().Run(chunks, [&](int, int item, int) {
    const int first = item * kGradientRows;
    SpreadArgs s{};
    s.turned = of_rows;
    s.a = from + (of_rows ? size_t(first) : size_t(first) * O), s.of_a = O;
    s.b = to_add, s.of_b = I;
    s.c = to + size_t(first) * I, s.of_c = I;
    s.I = std::min(rows - first, kGradientRows), s.J = int(I);
    s.K = int(of_rows ? T : O);
    kernels.spread(s);
  });
  return ffi::Error::Success();
}

// As `blocks`, and what gate and up gave before the activation: saved [T * K, 2F].
ffi::Error TrainCall(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> ids,
                     ffi::Buffer<ffi::F32> weights, ffi::AnyBuffer records,
                     ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::F32> hidden,
                     ffi::ResultBuffer<ffi::F32> outputs,
                     ffi::ResultBuffer<ffi::F32> saved, int64_t expert_dim) {
  const int64_t pairs = ids.element_count();
  if (int64_t(saved->element_count()) != pairs * 2 * expert_dim) {
    return Refuse("train: the room for what is saved is not [T * K, 2F]");
  }
  return WholeSum("train", x, ids, weights, records, *y, *hidden, *outputs,
                  saved->typed_data(), expert_dim, false, 0, 0.0f, 0);
}

// The calling thread's, for so many floats.
float* RecordRoom(size_t size) {
  static thread_local std::vector<float> room;
  if (room.size() < size) room.resize(size);
  return room.data();
}

// `drecords` without elements: the records are frozen, and may be of any float type.
ffi::Error TrainBackCall(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> ids,
                         ffi::Buffer<ffi::F32> weights, ffi::AnyBuffer records,
                         ffi::Buffer<ffi::F32> hidden, ffi::Buffer<ffi::F32> outputs,
                         ffi::Buffer<ffi::F32> saved, ffi::Buffer<ffi::F32> dy,
                         ffi::ResultBuffer<ffi::F32> dx,
                         ffi::ResultBuffer<ffi::F32> dweights,
                         ffi::ResultBuffer<ffi::F32> drecords,
                         ffi::ResultBuffer<ffi::F32> dsums,
                         ffi::ResultBuffer<ffi::F32> dhidden,
                         ffi::ResultBuffer<ffi::F32> dpairs) {
  const auto xs = x.dimensions(), is = ids.dimensions(), rs = records.dimensions();
  const auto hs = hidden.dimensions();
  if (xs.size() != 2 || is.size() != 2 || rs.size() != 2 || hs.size() != 2 ||
      is[0] != xs[0]) {
    return Refuse("train_back: expected x [T, D], ids [T, K], records [E, R]");
  }
  const int64_t T = xs[0], K = is[1], D = xs[1], E = rs[0], R = rs[1], F = hs[1];
  const int64_t pairs = T * K;
  ExpertLayout layout;
  std::string wrong = LayoutOf(records, D, F, false, 0, 0.0f, 0, &layout);
  if (!wrong.empty()) return Refuse("train_back: " + wrong);
  if (D % 16 != 0 || F % 16 != 0) {
    return Refuse("train_back: D " + std::to_string(D) + ", F " + std::to_string(F) +
                  " are no whole vectors of 16");
  }
  if (3 * D * F > INT32_MAX) return Refuse("train_back: experts are too large");
  const bool is_frozen = drecords->element_count() == 0;
  if (!is_frozen && layout.kind != Kind::kFloat32) {
    return Refuse("train_back: records that learn are float32");
  }
  const auto is_of = [](const auto& buffer, int64_t count) {
    return int64_t(buffer.element_count()) == count;
  };
  if (hs[0] != pairs || !is_of(weights, pairs) || !is_of(outputs, pairs * D) ||
      !is_of(saved, pairs * 2 * F) || !is_of(dy, T * D) || !is_of(*dx, T * D) ||
      !is_of(*dweights, pairs) || (!is_frozen && !is_of(*drecords, E * R)) ||
      !is_of(*dsums, pairs * D) || !is_of(*dhidden, pairs * 2 * F) ||
      !is_of(*dpairs, pairs * D)) {
    return Refuse("train_back: shapes do not fit");
  }
  static thread_local Placed p;
  static thread_local std::vector<BlockGroup> groups;
  static thread_local std::vector<int32_t> expert, pair, none;
  static thread_local std::vector<int> first_of_pairs;
  wrong = PlacePairs(ids.typed_data(), int(pairs), int(K), int(E), &p);
  if (!wrong.empty()) return Refuse("train_back: " + wrong);
  pair.resize(pairs);
  float* to_weights = dweights->typed_data();
  for (int n = 0; n < pairs; ++n) {
    if (p.place[n] >= 0) {
      pair[p.place[n]] = n;
    } else {
      to_weights[n] = 0.0f;  // of no expert
    }
  }
  const auto* each = static_cast<const uint8_t*>(records.untyped_data());
  float* to_records = drecords->typed_data();
  groups.clear(), expert.clear(), none.clear(), first_of_pairs.assign(1, 0);
  for (int e = 0, first = 0; e < E; first = p.next[e++]) {
    if (p.next[e] == first) {
      none.push_back(e);
      continue;
    }
    groups.push_back({each + size_t(e) * layout.record_bytes, first, p.next[e]});
    expert.push_back(e);
    first_of_pairs.push_back(first_of_pairs.back() +
                             Blocks(p.next[e] - first, kGradientRows));
  }
  GradientArgs a{};
  a.D = int(D), a.F = int(F), a.kind = layout.kind, a.x = x.typed_data();
  a.groups = groups.data(), a.expert = expert.data();
  a.token = p.token.data(), a.pair = pair.data();
  a.weights = weights.typed_data(), a.dy = dy.typed_data();
  a.saved = saved.typed_data(), a.hidden = hidden.typed_data();
  a.outputs = outputs.typed_data();
  a.dweights = to_weights, a.dsums = dsums->typed_data();
  a.dhidden = dhidden->typed_data(), a.dpairs = dpairs->typed_data();
  a.drecords = to_records, a.record = size_t(R);
  const BlockSumArgs sum{a.dpairs, nullptr, p.place.data(), dx->typed_data(), int(T),
                         int(K), int(D)};
  const GradientKernels& kernels = *Best().gradients;
  const BlockKernels& blocks = *Best().blocks;
  Team& team = Team::Get();
  // Of this thread's: in others the names above mean their own.
  const int32_t *has_none = none.data(), *which = a.expert;
  const int *firsts = first_of_pairs.data(), *end = firsts + first_of_pairs.size();
  const int count = int(groups.size());
  const int rows = Blocks(2 * a.F, kGradientRows) + Blocks(a.D, kGradientRows);
  const int of_records = is_frozen ? 0 : count * rows + int(none.size());
  const size_t room = layout.kind == Kind::kFloat32 ? 0 : 3 * size_t(D) * F;
  const int chunks[] = {first_of_pairs.back(), of_records,
                        team.Chunks(double(sizeof(float)) * pairs * D)};
  team.Run(chunks, [&](int phase, int item, int many) {
    if (phase == 2) return blocks.sum(sum, item, many);
    if (phase == 0) {
      const int group = int(std::upper_bound(firsts, end, item) - firsts) - 1;
      return kernels.pairs(a, RecordRoom(room), group, item - firsts[group]);
    }
    // What is behind a record's weights, and experts without tokens, have no gradient.
    const size_t used = 3 * size_t(D) * F;
    if (item >= count * rows) {
      std::fill_n(to_records + size_t(has_none[item - count * rows]) * R, R, 0.0f);
      return;
    }
    const int group = item / rows;
    kernels.records(a, group, item % rows);
    if (item % rows == 0) {
      std::fill_n(to_records + size_t(which[group]) * R + used, R - used, 0.0f);
    }
  });
  return ffi::Error::Success();
}

}  // namespace moe_edge

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_product_back, moe_edge::ProductBackCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Attr<bool>("of_rows"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_train, moe_edge::TrainCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::S32>()
                                  .Arg<moe_edge::F32>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Attr<int64_t>("expert_dim"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_edge_train_back, moe_edge::TrainBackCall,
                              xla::ffi::Ffi::Bind()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::S32>()
                                  .Arg<moe_edge::F32>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::F32>()
                                  .Arg<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>()
                                  .Ret<moe_edge::F32>());

}  // extern "C"
#pragma GCC visibility pop
