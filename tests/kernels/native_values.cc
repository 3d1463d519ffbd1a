// What the portable kernels compute of given numbers, as float32 on stdout: the same
// program on two processors says the same, but for roundings (test_native_on_arm.py).
#include "sets.h"

#include <cstdio>

// As kernels.cc has them.
extern "C" struct KeptExperts {
  const uint8_t* const* each;
  float limit;
  int32_t E, D, F, has_bias, activation, kind, int8;
};
extern "C" const char* moe_edge_experts_at(const KeptExperts*, const float*, const int32_t*,
                                           const float*, int, int, const int32_t*, int, float*);

using namespace moe_edge;  // NOLINT

namespace {

uint64_t seed = 1;

uint32_t Next() { return uint32_t((seed = seed * 6364136223846793005u + 1) >> 33); }

std::vector<float> Draw(size_t count) {
  std::vector<float> found(count);
  for (float& value : found) value = (float(Next() % 65536) - 32768.0f) / 32768.0f;
  return found;
}

void Tell(const std::vector<float>& values) {
  std::fwrite(values.data(), sizeof(float), values.size(), stdout);
}

constexpr Kind kKinds[] = {Kind::kFloat32, Kind::kBfloat16, Kind::kQ8_0,   Kind::kQ4_0,
                           Kind::kMxfp4,   Kind::kQ8_0x8,   Kind::kQ4_0x8, Kind::kMxfp4x8};

// Rows of weights near 1: codes are any bytes, scales are small.
std::vector<uint8_t> Weights(Kind kind, int rows, int width) {
  std::vector<uint8_t> found(rows * RowBytes(kind, width));
  if (!InBlocks(kind)) {
    const std::vector<float> values = Draw(size_t(rows) * width);
    for (size_t n = 0; n < values.size(); ++n) {
      const size_t size = kind == Kind::kFloat32 ? 4 : 2;
      std::memcpy(&found[n * size], reinterpret_cast<const char*>(&values[n]) + 4 - size, size);
    }
    return found;
  }
  for (uint8_t& byte : found) byte = uint8_t(Next());
  const size_t each = IsInterleaved(kind) ? kEight : 1, block = each * RowBytes(kind, kBlock);
  const bool is_power = RowBytes(kind, kBlock) == 17;
  for (size_t at = 0; at < found.size(); at += block) {
    for (size_t n = 0; n < each; ++n) {
      if (is_power) {
        found[at + n] = uint8_t(124 + Next() % 3);
      } else {
        const uint16_t half = uint16_t(0x1C00 + Next() % 0x400);
        std::memcpy(&found[at + 2 * n], &half, sizeof half);
      }
    }
  }
  return found;
}

void Products() {
  constexpr int T = 5, I = 96, O = 40;
  const std::vector<float> x = Draw(T * I);
  for (const Kind kind : kKinds) {
    const std::vector<uint8_t> w = Weights(kind, O, I);
    std::vector<float> y(T * O);
    LinearArgs a{x.data(), w.data(), y.data(), T, I, O, kind};
    portable::kKernels.linear(a, 0, O);
    Tell(y);
    if (!IsInterleaved(kind)) continue;
    RoundedRoom room;
    const float* rows[T];
    for (int t = 0; t < T; ++t) rows[t] = &x[t * I];
    a.rounded = room.Round(portable::kRounded, rows, T, I), a.int8 = &portable::kRounded;
    portable::kKernels.linear(a, 0, O);
    Tell(y);
  }
}

void Experts() {
  constexpr int T = 3, K = 2, E = 4, D = 64, F = 32;
  const std::vector<float> x = Draw(T * D);
  const int32_t ids[T * K] = {0, 3, 2, 0, 4, 1};  // 4: none
  const std::vector<float> weights = Draw(T * K);
  for (const Kind kind : kKinds) {
    std::vector<std::vector<uint8_t>> records;
    const uint8_t* each[E];
    for (int e = 0; e < E; ++e) {
      std::vector<uint8_t> record = Weights(kind, 2 * F, D);
      const std::vector<uint8_t> down = Weights(kind, D, F);
      record.insert(record.end(), down.begin(), down.end());
      records.push_back(record);
    }
    for (int e = 0; e < E; ++e) each[e] = records[e].data();
    for (const int activation : {0, 1, 2, 3}) {
      std::vector<float> y(T * D);
      const KeptExperts kept{each, 1.5f, E, D, F, 0, activation, int(kind), 0};
      moe_edge_experts_at(&kept, x.data(), ids, weights.data(), T, K, nullptr, 0, y.data());
      Tell(y);
    }
  }
}

void Attention() {
  constexpr int B = 2, G = 2, Q = 3, P = 64, W = 32, M = 20, half = 16;
  const std::vector<float> q = Draw(B * G * Q * P), k = Draw(B * G * P), v = Draw(B * G * W);
  const std::vector<float> norm = Draw(P), angles = Draw(B * half), sinks = Draw(G * Q);
  const int32_t start[B] = {6, 19};
  for (const Kind kind : {Kind::kFloat32, Kind::kBfloat16, Kind::kQ8_0}) {
    std::vector<uint8_t> keys = Weights(kind, B * G * M, P), values = Weights(kind, B * G * M, W);
    std::vector<float> queries(q.size()), y(B * G * Q * W);
    StepArgs s{q.data(), k.data(), v.data(), norm.data(), norm.data(), queries.data(),
               keys.data(), values.data(), start};
    s.B = B, s.G = G, s.Q = Q, s.P = P, s.W = W, s.M = M, s.eps = 1e-6f, s.cache = kind;
    s.rotation = {angles.data(), angles.data(), half, false};
    portable::kKernels.prepare(s, 0, 1);
    AttendArgs a{};
    a.q = queries.data(), a.k = keys.data(), a.v = values.data(), a.start = start;
    a.sinks = sinks.data(), a.y = y.data(), a.scale = 0.2f, a.window = 11, a.cache = kind;
    a.B = B, a.S = 1, a.G = G, a.Q = Q, a.P = P, a.W = a.stride = W, a.M = M;
    portable::kKernels.attend(a, 0, 1);
    Tell(y);
  }
}

void Latents() {
  constexpr int B = 2, H = 3, R = 48, nope = 12, rope = 16, value = 9, M = 20;
  const std::vector<float> q = Draw(B * H * (nope + rope)), low = Draw(B * (R + rope));
  const std::vector<float> norm = Draw(R), angles = Draw(B * rope / 2);
  const int32_t start[B] = {6, 19};
  for (const Kind kind : {Kind::kFloat32, Kind::kBfloat16, Kind::kQ8_0}) {
    const Kind stored = kind == Kind::kQ8_0 ? Kind::kBfloat16 : kind;
    const std::vector<uint8_t> w = Weights(stored, H * (nope + value), R);
    std::vector<uint8_t> cache = Weights(kind, B * M, R + rope);
    std::vector<float> queries(B * H * (R + rope)), contexts(B * H * R), y(B * H * value);
    LatentArgs a{q.data(), low.data(), norm.data(), w.data(), cache.data(), start,
                 y.data(), queries.data(), contexts.data()};
    a.B = B, a.H = H, a.R = R, a.nope = nope, a.rope = rope, a.value = value, a.M = M;
    a.eps = 1e-6f, a.kind = stored, a.cached = kind;
    a.rotation = {angles.data(), angles.data(), rope / 2, true};
    portable::kKernels.latent(a, false, 0, 1);
    AttendArgs t{};
    t.q = queries.data(), t.k = t.v = cache.data(), t.start = start, t.y = contexts.data();
    t.B = B, t.S = 1, t.G = 1, t.Q = H, t.P = t.stride = R + rope, t.W = R, t.M = M;
    t.window = 1 << 20, t.scale = 0.1f, t.cache = kind;
    portable::kKernels.attend(t, 0, 1);
    portable::kKernels.latent(a, true, 0, 1);
    Tell(y);
  }
}

void Others() {
  constexpr int T = 3, E = 20, K = 5, N = 2, V = 24;
  const std::vector<float> x = Draw(T * E), weight = Draw(E);
  std::vector<float> y(T * E);
  portable::kKernels.norm({x.data(), weight.data(), y.data(), T, E, 1e-6f}, 0, 1);
  Tell(y);
  int32_t ids[T * K];
  portable::kKernels.top_k({x.data(), ids, T, E, K}, 0, 1);
  Tell({ids, ids + T * K});
  const std::vector<float> q = Draw(N * E), v = Draw(N * V), state = Draw(N * E * V);
  std::vector<float> out(N * V), after(N * E * V);
  const float g[N] = {-0.5f, -0.1f}, beta[N] = {0.3f, 0.9f};
  portable::kKernels.delta({q.data(), x.data(), v.data(), g, beta, state.data(), out.data(),
                            after.data(), N, E, V}, 0, 1);
  Tell(out), Tell(after);
}

}  // namespace

int main() {
  Products(), Experts(), Attention(), Latents(), Others();
}
