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

}  // namespace moe_edge
