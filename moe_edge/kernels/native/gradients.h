// What the kernels of gradients are told, see gradients.inc.
#pragma once

#include "blocks.h"

namespace moe_edge {

constexpr int kGradientRows = 48;  // of an item: whole tiles for every instruction set
constexpr int kGradientSteps = 128;  // of a sum, whose rows stay in the nearest cache

// c[i, j] = sum over k of a(i, k) * b[k, j]; J in whole vectors of 16.
struct SpreadArgs {
  const float* a;         // rows i of K values, or `turned`: rows k of I values
  const float* b;         // rows of J values
  float* c;               // rows i of J values
  size_t of_a, of_b, of_c;  // from one row to the next
  const int32_t* at;      // [K] which row of b is k, or null: k itself
  int I, J, K;
  bool turned;
  bool adds;  // to what is in c
};

// Of the experts' weighted sum with gated SiLU and records of floats without biases;
// D and F in whole vectors. Pairs stand in order of expert.
struct GradientArgs {
  int D, F;
  Kind kind;                 // of the records
  const float* x;            // [T, D]
  const BlockGroup* groups;  // [count]
  const int32_t* expert;     // [count], a group's
  const int32_t *token, *pair;  // [pairs], of a place: token, and token * K + rank
  const float* weights;      // [T, K]
  const float* dy;           // [T, D]
  const float *saved, *hidden, *outputs;  // [pairs, 2F], [pairs, F], [pairs, D]
  float* dweights;           // [T, K]
  float* dsums;              // [pairs, D], weight * dy
  float* dhidden;            // [pairs, 2F]
  float* dpairs;             // [pairs, D], what a pair adds to dx
  float* drecords;           // [E, record]
  size_t record;             // floats of a record
};

// Items of `pairs` are kGradientRows of a group's pairs, with room for a record; of `records` as many rows of a
// group's gate and up, then of its down.
struct GradientKernels {
  void (*spread)(const SpreadArgs&);
  void (*pairs)(const GradientArgs&, float* room, int group, int item);
  void (*records)(const GradientArgs&, int group, int item);
};

// Causal attention of whole sequences. R heads of queries, of which Q share each of the
// C = R / Q heads of keys and values; P in whole vectors. `padded`: S in whole vectors.
struct TrainAttendArgs {
  int S, P, Q, padded;
  int window;           // the latest positions that a query sees
  float scale;
  const float* q;       // [R, S, P]
  const float *k, *v;   // [C, S, P], k of the gradients only, v of the forward pass only
  const float* turned;  // [C, P, padded], keys; of the gradients: values
  float* weights;       // [R, S, padded], of the gradients read only
  float* y;             // [R, S, P]
  const float* dy;      // [R, S, P]
  float* dscores;       // [R, S, padded]
  float *dq, *dk, *dv;
};

// Of a head and a block of kGradientRows queries, of the last one keys. The last one
// reads what the second wrote for all queries.
struct TrainAttendKernels {
  void (*attend)(const TrainAttendArgs&, int head, int block);
  void (*queries)(const TrainAttendArgs&, int head, int block);
  void (*keys)(const TrainAttendArgs&, int cached, int block);
};

}  // namespace moe_edge
