// A step of gated delta-nets, what it is told: plain pointers, checked by delta_calls.h.
#pragma once

namespace moe_edge {

// Of each of N heads, with s = e^g state: change = beta (v - s^T k); state = s + k change;
// y = state^T q. A head whose g and beta are 0 keeps the bits of its state.
struct DeltaArgs {
  const float *q, *k;     // [N, K]
  const float* v;         // [N, V]
  const float *g, *beta;  // [N]
  const float* state;     // [N, K, V]
  float* y;               // [N, V]
  float* after;           // [N, K, V]; may be `state`
  int N, K, V;
};

}  // namespace moe_edge
