// What kernels are told: plain pointers and sizes, checked by whoever fills them in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_edge {

// How weights are stored. Blocks are GGUF's: a scale and 32 weights. Those of x8 stand
// interleaved: of eight rows first the scales of a block, then codes, four bytes a row.
// Of int4 the scale is bfloat16; of fp8 float32, of 128 weights.
enum class Kind {
  kFloat32, kBfloat16, kQ8_0, kQ4_0, kMxfp4, kQ8_0x8, kQ4_0x8, kMxfp4x8, kInt4x8, kFp8x8
};
constexpr int kBlock = 32, kFp8Block = 128, kEight = 8;
constexpr int kTile = 4;  // vectors that share a pass over a row, or over keys

constexpr size_t RowBytes(Kind kind, size_t width) {
  switch (kind) {
    case Kind::kFloat32: return 4 * width;
    case Kind::kBfloat16: return 2 * width;
    case Kind::kQ8_0:
    case Kind::kQ8_0x8: return width / kBlock * 34;
    case Kind::kQ4_0:
    case Kind::kInt4x8:
    case Kind::kQ4_0x8: return width / kBlock * 18;
    case Kind::kFp8x8: return width / kFp8Block * 132;
    case Kind::kMxfp4:
    case Kind::kMxfp4x8: return width / kBlock * 17;
  }
  return 0;
}

enum class Activation { kSilu, kGelu, kGeluTanh, kClampedSwiglu };

constexpr bool IsInterleaved(Kind kind) { return kind >= Kind::kQ8_0x8; }

// Whether kernels meet it with vectors of 8 bits.
constexpr bool MeetsRounded(Kind kind) {
  return IsInterleaved(kind) && kind < Kind::kInt4x8;
}

// The bits of the nearest float16, ties to even. By whole numbers: compilers name the type
// differently, and call libraries for it that not every system has.
inline uint16_t HalfOf(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return uint16_t(sign | 0x7E00);
  if (size >= 0x477FF000) return uint16_t(sign | 0x7C00);  // beyond the largest
  if (size >= 0x38800000) {
    return uint16_t(sign | (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13);
  }
  // Denormal: the sum's last place is theirs.
  const float whole = (value < 0 ? -value : value) + 0.5f;
  __builtin_memcpy(&bits, &whole, sizeof bits);
  return uint16_t(sign | (bits - 0x3F000000));
}

inline float FloatOfHalf(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, size = half & 0x7FFF;
  if (size < 0x400) {
    const float value = float(size) * 0x1p-24f;
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (size < 0x7C00 ? size + (112 << 10) : size + (224 << 10)) << 13;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

struct Rounded;
struct RoundedKernels;

// y[t, o] = sum_i x[t, i] * w[o, i]
struct LinearArgs {
  const float* x;   // [T, I]
  const uint8_t* w; // [O, I] as stored
  float* y;         // [T, O]
  int T, I, O;
  Kind kind;
  const Rounded* rounded = nullptr;  // [T] x in blocks of 8 bits; null: x is exact
  const RoundedKernels* int8 = nullptr;
};

// An expert's record: gate [F, D] | up [F, D] | down [D, F] | biases, all of one kind,
// but for the biases of blocks, which are float32.
struct ExpertLayout {
  int D, F;
  bool has_bias;
  Activation activation;
  float limit;
  Kind kind;
  size_t record_bytes;
};

constexpr bool InBlocks(Kind kind) {
  return kind != Kind::kFloat32 && kind != Kind::kBfloat16;
}

// Bytes that such a record must have at least.
constexpr size_t LeastBytes(Kind kind, size_t D, size_t F, bool has_bias) {
  const Kind of_bias = InBlocks(kind) ? Kind::kFloat32 : kind;
  return 3 * RowBytes(kind, D * F) + (has_bias ? RowBytes(of_bias, 2 * F + D) : 0);
}

// y[t] = start[t] + sum over ranks k of weights[t, k] * expert(ids[t, k])(x[t]); with
// `rows` instead each pair's own output, unweighted, zeros for pairs left out.
struct ExpertArgs {
  ExpertLayout layout;
  const float* x;         // [T, D]
  const int32_t* ids;     // [T, K]; E or more: no expert
  const float* weights;   // [T, K]; null with rows
  const uint8_t* records; // [E, record_bytes], or null:
  const uint8_t* const* each = nullptr;  // [E] records, wherever they are
  const float* start;     // [T, D] or null: zeros
  float* y;               // [T, D], or [T * K, D] with rows
  int T, K, E;
  bool rows;
  const Rounded* rounded = nullptr;  // [T] x in blocks of 8 bits; null: x is exact
  const RoundedKernels* int8 = nullptr;
};

// y[t] = x[t] / sqrt(mean of its squares + eps) * weight
struct NormArgs {
  const float *x, *weight;  // [T, D], [D]
  float* y;                 // [T, D]
  int T, D;
  float eps;
};

// ids[t] = the K largest of x[t], the largest first, of equal ones the lower id first.
struct TopKArgs {
  const float* x;  // [T, E]
  int32_t* ids;    // [T, K], K <= E
  int T, E, K;
};

// y[b, s, h] = the values that query h of token s of row b attends to: Q queries share
// each of G heads of the cache, h = g * Q + query.
struct AttendArgs {
  const float* q;        // [B, S, G * Q, P]
  const uint8_t* k;      // [B * G, M, P], the tokens' own among them
  const uint8_t* v;      // [B * G, M, W]
  const int32_t* start;  // [B], position of each row's first token
  const float* sinks;    // [G * Q] logits that join the denominator, or null
  float* y;              // [B, S, G * Q, W]
  int B, S, G, Q, P, W, M;
  int window;            // the latest positions that a token sees, or a chunk's size
  float scale;
  bool chunked;          // a token sees those of its own chunk
  int stride;            // from one value to the next, which may be a part of a key
  Kind cache;            // float32, bfloat16 or q8_0: how keys and values are stored
  int tile = kTile;      // most queries that share a pass over keys
};

// By which angles heads turn: pairs (i, i + half), or (2 i, 2 i + 1).
struct Rotation {
  const float *cos, *sin;  // [B, half]
  int half;                // 0: they do not
  bool interleaved;
};

// What one token of each row brings to attention: products of q, k, v, and caches.
struct StepArgs {
  const float *q, *k, *v;           // [B, G * Q, P], [B, G, P], [B, G, W]
  const float *q_norm, *k_norm;     // [P], or null
  float* queries;                   // [B, G * Q, P]
  uint8_t *keys, *values;           // caches [B * G, M, P], [B * G, M, W]
  const int32_t* start;             // [B], position of each token
  int B, G, Q, P, W, M;
  float eps;
  Kind cache;
  Rotation rotation;
};

// Latent attention of one token in each of B rows: all heads share what is cached.
struct LatentArgs {
  const float* q;        // [B, H, nope + rope]
  const float* low;      // [B, R + rope], the product of latent and shared key
  const float* norm;     // [R]
  const uint8_t* w;      // [H, nope + value, R]: up-projections of keys, then of values
  uint8_t* cache;        // [B, M, R + rope]
  const int32_t* start;  // [B], position of each token
  float* y;              // [B, H, value]
  float* queries;        // [B, H, R + rope]
  float* contexts;       // [B, H, R]
  int B, H, R, nope, rope, value, M;
  float eps;
  Kind kind, cached;     // of w, of the cache
  Rotation rotation;
};

// Pairs (token * K + rank) by expert, which all tokens of a step read once.
struct Groups {
  const int32_t* expert;  // [count]
  const int32_t* first;   // [count + 1], of a group's pairs in `order`
  const int32_t* order;   // [pairs]
  const int32_t* place;   // [T * K], of a pair in `order`; -1: it is left out
  int count, pairs;
};

struct BlockKernels;
struct DeltaArgs;
struct GradientKernels;
struct TrainAttendKernels;

// Compiled once for every instruction set.
struct Kernels {
  const char* name;
  void (*linear)(const LinearArgs&, long first, long last);  // rows of the weights
  void (*norm)(const NormArgs&, int chunk, int chunks);
  void (*top_k)(const TopKArgs&, int chunk, int chunks);
  void (*attend)(const AttendArgs&, int chunk, int chunks);
  void (*prepare)(const StepArgs&, int chunk, int chunks);
  void (*latent)(const LatentArgs&, bool is_after, int chunk, int chunks);
  // Of the pairs as they stand in `order`: hidden [pairs, F], outputs [pairs, D]. Few
  // large experts: `hidden`, then `outputs`, which sums too; many: `whole`, then `sum`.
  void (*hidden)(const ExpertArgs&, const Groups&, float* hidden, int chunk, int chunks);
  void (*outputs)(const ExpertArgs&, const Groups&, const float* hidden, float* outputs,
                  int chunk, int chunks);
  void (*whole)(const ExpertArgs&, const Groups&, float* hidden, float* outputs,
                int chunk, int chunks);
  void (*sum)(const ExpertArgs&, const Groups&, const float* outputs, int chunk,
              int chunks);
  const BlockKernels* blocks;  // for many tokens
  const GradientKernels* gradients;
  const TrainAttendKernels* train_attend;
  void (*delta)(const DeltaArgs&, int chunk, int chunks);
};

}  // namespace moe_edge

// `function` for a type of weights, of the rows of rows.inc.
#define MOE_EDGE_EACH_KIND(kind, function, ...)                  \
  switch (kind) {                                                \
    case Kind::kFloat32: return function<Float32>(__VA_ARGS__);  \
    case Kind::kBfloat16: return function<Bfloat16>(__VA_ARGS__); \
    case Kind::kQ8_0: return function<Q8_0>(__VA_ARGS__);        \
    case Kind::kQ4_0: return function<Q4_0>(__VA_ARGS__);        \
    case Kind::kMxfp4: return function<Mxfp4>(__VA_ARGS__);      \
    case Kind::kQ8_0x8: return function<Eight<Q8_0>>(__VA_ARGS__); \
    case Kind::kQ4_0x8: return function<Eight<Q4_0>>(__VA_ARGS__); \
    case Kind::kMxfp4x8: return function<Eight<Mxfp4>>(__VA_ARGS__); \
    case Kind::kInt4x8: return function<Eight<Int4>>(__VA_ARGS__); \
    case Kind::kFp8x8: return function<Eight<Fp8>>(__VA_ARGS__); \
  }
