// What the kernels for many tokens are told, see blocks.inc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace moe_edge {

constexpr int kBlockRows = 64;     // of an item: a chunk of work of one thread
constexpr int kBlockVectors = 96;  // that meet them, before others do
constexpr int kGroupRows = 8;      // in the nearest cache, at most
constexpr int kColumns = 1024;     // of them at a time

// Whole vectors of 16 floats: rows end with zeros, which add nothing to a sum.
constexpr int Padded(int width) { return (width + 15) / 16 * 16; }
constexpr int Blocks(int count, int size) { return (count + size - 1) / size; }

// An expert and its pairs: `first` .. `end` - 1 in order of expert.
struct BlockGroup {
  const uint8_t* record;
  int first, end;
};

struct BlockArgs {
  ExpertLayout layout;
  const float* x;            // [T, Padded(D)]
  const BlockGroup* groups;  // [count], those that are computed now
  int count;
  const int32_t* token;      // [pairs] in order of expert
  float* hidden;             // [pairs, Padded(F)]
  float* saved;              // [pairs, 2F] gate and up before the activation, or null
  float* outputs;            // [pairs, D]
};

// y[t] = sum over ranks k of weights[t, k] * outputs[place[t, k]]; null: all are one
struct BlockSumArgs {
  const float* outputs;   // [pairs, D]
  const float* weights;   // [T, K]
  const int32_t* place;   // [T, K]; -1: no expert
  float* y;               // [T, D]
  int T, K, D;
};

// A thread's own room.
struct alignas(64) BlockRoom {
  float lanes[kBlockVectors * kGroupRows * 16];  // sums of rows in pieces
  float out[kBlockVectors * kBlockRows], up[kBlockVectors * kBlockRows];
  float* rows;  // [kGroupRows, width], widened
};

// An item is kBlockRows rows: of a matrix and kBlockVectors vectors (`product`), or of
// an expert and all its tokens. A chunk of `whole` is a run of experts, of `sum` a run of
// tokens.
struct BlockKernels {
  void (*product)(const LinearArgs&, BlockRoom* room, int item);
  void (*hidden)(const BlockArgs&, BlockRoom* room, int item);
  void (*outputs)(const BlockArgs&, BlockRoom* room, int item);
  void (*whole)(const BlockArgs&, BlockRoom* room, int chunk, int chunks);
  void (*sum)(const BlockSumArgs&, int chunk, int chunks);
};

}  // namespace moe_edge
