// Vectors rounded to 8 bits, which meet interleaved rows in whole numbers (rounded.inc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "types.h"

namespace moe_edge {

// A vector in blocks of 32: value i is scale[i / 32] * codes[i].
struct Rounded {
  const int8_t* codes;   // -127 .. 127
  const float* scale;    // [blocks]
  const int32_t* total;  // [blocks], sums of codes
};

struct RoundedKernels {
  // To the nearest of 255 values of each block; of a block with NaN the scale is NaN.
  void (*round)(const float* x, int width, int8_t* codes, float* scale, int32_t* total);
  // out[t * stride + n] = row (first + n) . x[t] of `count` vectors, at most kTile, and
  // whole eights of rows; what stands `ahead` bytes behind them is wanted soon.
  void (*rows)(Kind kind, const uint8_t* w, long first, long rows, int width,
               const Rounded* x, int count, float* out, size_t stride, ptrdiff_t ahead);
};

// Room for some rounded vectors of a width.
class RoundedRoom {
 public:
  // Of vectors wherever they stand.
  const Rounded* Round(const RoundedKernels& kernels, const float* const* x, int count,
                       int width) {
    const size_t blocks = width / kBlock;
    if (codes_.size() < size_t(count) * width) codes_.resize(size_t(count) * width);
    if (scale_.size() < count * blocks) {
      scale_.resize(count * blocks), total_.resize(count * blocks);
    }
    each_.resize(count);
    for (int t = 0; t < count; ++t) {
      int8_t* codes = &codes_[size_t(t) * width];
      float* scale = &scale_[t * blocks];
      int32_t* total = &total_[t * blocks];
      kernels.round(x[t], width, codes, scale, total);
      each_[t] = {codes, scale, total};
    }
    return each_.data();
  }

 private:
  std::vector<int8_t> codes_;
  std::vector<float> scale_;
  std::vector<int32_t> total_;
  std::vector<Rounded> each_;
};

}  // namespace moe_edge
