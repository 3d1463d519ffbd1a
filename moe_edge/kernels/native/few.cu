// Rows times experts' weights in bfloat16 or float32, of each expert a few: two rows of
// weights a warp, gate and up of one neuron or two outputs of down.
//
// One source, compiled twice as prefetch.cu is. What the threads of a warp do together
// is written as lanes: on a GPU a thread has one of them, on the host a loop has all. No
// warp waits for another.

struct Few {  // what a launch is given, by value
  const float* x;             // rows of `width`
  unsigned char* slots;       // records, one after another
  const unsigned char* host;  // the same in the host's memory
  // Of each block of rows, as `Rows` of kernels/few.py. Null but for `record`: block b
  // is the one row b.
  const int *record, *row, *count, *pair;
  const int* absent;   // of each block the host's record, -1: its slot has it; or null
  const float* scale;  // of each pair, or null
  float* out;          // [pairs, outputs]
  long long record_bytes;
  long long first[2];  // bytes to each matrix; the second -1: there is one
  long long bias[2];   // bytes to their biases, -1: none
  int blocks, width, outputs, slot_count, host_count;
  int sharing;     // pairs that share a row of x
  int activation;  // that makes one of gate and up, a number of native.py's
  int wide;        // whether all rows stand where loads of 16 bytes may
  int miss_warps;  // that share what is absent; they come first
  float limit;     // of the activation
};

#ifndef MOE_EDGE_ON_HOST
#include "cuda_lanes.h"
#endif

namespace few {

constexpr int kLanes = 32;
constexpr int kAtOnce = 8;  // loads of 16 bytes that a lane has under way, of each row
constexpr int kMost = 4;    // rows of x that meet weights read once

__device__ __forceinline__ unsigned& Word(uint4& words, int at) {
  return at == 0 ? words.x : at == 1 ? words.y : at == 2 ? words.z : words.w;
}

struct Bfloat16 {
  using Item = unsigned short;
  static constexpr int kItems = 8;  // in 16 bytes
  static __device__ __forceinline__ float Value(uint4 words, int at) {
    const unsigned word = Word(words, at / 2);
    return __uint_as_float(at % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }
};

struct Float32 {
  using Item = unsigned;
  static constexpr int kItems = 4;
  static __device__ __forceinline__ float Value(uint4 words, int at) {
    return __uint_as_float(Word(words, at));
  }
};

// Sixteen bytes of a row of `width` weights, the `vector`th; zeros beyond its end.
template <class Type, bool kWide>
__device__ __forceinline__ uint4 Load(const unsigned char* row, int vector, int width,
                                      bool known) {
  if (kWide) return LoadSixteen(row + 16ll * vector, known);
  using Item = typename Type::Item;
  uint4 found = {0, 0, 0, 0};
  UNROLLED for (int i = 0; i < Type::kItems; ++i) {
    const int at = vector * Type::kItems + i;
    const Item item = LoadItem<Item>(row + at * sizeof(Item), known && at < width);
    const int bits = i * 8 * sizeof(Item);
    Word(found, bits / 32) |= unsigned(item) << bits % 32;
  }
  return found;
}

template <class Type, bool kWide>
__device__ __forceinline__ void Store(unsigned char* row, int vector, int width,
                                      uint4 words) {
  if (kWide) {
    *(uint4*)(row + 16ll * vector) = words;
    return;
  }
  using Item = typename Type::Item;
  UNROLLED for (int i = 0; i < Type::kItems; ++i) {
    const int at = vector * Type::kItems + i, bits = i * 8 * sizeof(Item);
    if (at < width) ((Item*)row)[at] = Item(Word(words, bits / 32) >> bits % 32);
  }
}

// What meets those weights.
template <class Type, bool kWide>
__device__ __forceinline__ void LoadRow(const float* row, int vector, int width,
                                        float (&found)[Type::kItems]) {
  UNROLLED for (int i = 0; i < Type::kItems; i += 4) {
    const int at = vector * Type::kItems + i;
    if (kWide) {
      uint4 words = LoadSixteen((const unsigned char*)(row + at), at < width);
      UNROLLED for (int j = 0; j < 4; ++j) {
        found[i + j] = __uint_as_float(Word(words, j));
      }
    } else {
      UNROLLED for (int j = 0; j < 4; ++j) {
        found[i + j] = at + j < width ? row[at + j] : 0.0f;
      }
    }
  }
}

// As `activate` of model/layers.py; NaN stays NaN.
__device__ __forceinline__ float Activate(const Few& a, float gate, float up) {
  switch (a.activation) {
    case 0: return gate / (1.0f + expf(-gate)) * up;
    case 1: return 0.5f * gate * (1.0f + erff(gate * 0.70710678f)) * up;
    case 2: {
      const float inner = 0.79788456f * (gate + 0.044715f * gate * gate * gate);
      return 0.5f * gate * (1.0f + tanhf(inner)) * up;
    }
    default: {
      gate = gate > a.limit ? a.limit : gate;
      up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
      return (up + 1.0f) * gate / (1.0f + expf(-1.702f * gate));
    }
  }
}

struct Task {  // of a warp: a block's rows meet two rows of its weights, or one
  unsigned char* slot;        // the block's record
  const unsigned char* host;  // the same, where it arrives; else null
  long long at[2], bias[2];   // bytes into the record
  int output, streams, row, rows;
};

// The bits of a row depend neither on the others nor on `kRows`.
template <class Type, bool kWide, int kRows>
__device__ __forceinline__ void Multiply(const Few& a, const Task& t, int begin) {
  using Item = typename Type::Item;
  const bool arrives = t.host != nullptr && begin == 0;
  const unsigned char* from = arrives ? t.host : t.slot;
  int pairs[kRows];
  int x[kRows];  // where their rows begin
  UNROLLED for (int r = 0; r < kRows; ++r) {  // the last one again where they end
    const int at = t.row + (begin + r < t.rows ? begin + r : t.rows - 1);
    pairs[r] = a.pair != nullptr ? a.pair[at] : at;
    x[r] = pairs[r] / a.sharing * a.width;
  }
  Lanes<float> sums[kRows][2];
  EACH_LANE(lane) {
    UNROLLED for (int s = 0; s < 2; ++s) {
      Item item = 0;
      if (lane == 0 && s < t.streams && t.bias[s] >= 0) {
        item = LoadItem<Item>(from + t.bias[s], true);
        if (arrives) *(Item*)(t.slot + t.bias[s]) = item;
      }
      const float bias = Type::Value({unsigned(item), 0, 0, 0}, 0);
      UNROLLED for (int r = 0; r < kRows; ++r) sums[r][s][lane] = bias;
    }
  }
  const int vectors = (a.width + Type::kItems - 1) / Type::kItems;
  constexpr int kHeld = kWide ? kAtOnce : 1;
  for (int first = 0; first < vectors; first += kHeld * kLanes) {
    EACH_LANE(lane) {
      uint4 held[2][kHeld];  // all are asked for before the first is used
      UNROLLED for (int k = 0; k < kHeld; ++k) {
        const int vector = first + k * kLanes + lane;
        UNROLLED for (int s = 0; s < 2; ++s) {
          held[s][k] = Load<Type, kWide>(from + t.at[s], vector, a.width,
                                         vector < vectors && s < t.streams);
        }
      }
      if (arrives) {
        UNROLLED for (int k = 0; k < kHeld; ++k) {
          const int vector = first + k * kLanes + lane;
          UNROLLED for (int s = 0; s < 2; ++s) {
            if (vector < vectors && s < t.streams) {
              Store<Type, kWide>(t.slot + t.at[s], vector, a.width, held[s][k]);
            }
          }
        }
      }
      UNROLLED for (int k = 0; k < kHeld; ++k) {
        if (first + k * kLanes >= vectors) continue;  // for all lanes
        UNROLLED for (int r = 0; r < kRows; ++r) {
          float met[Type::kItems];
          LoadRow<Type, kWide>(a.x + x[r], first + k * kLanes + lane, a.width, met);
          UNROLLED for (int i = 0; i < Type::kItems; ++i) {
            UNROLLED for (int s = 0; s < 2; ++s) {
              float& sum = sums[r][s][lane];
              sum = fmaf(Type::Value(held[s][k], i), met[i], sum);
            }
          }
        }
      }
    }
  }
  UNROLLED for (int r = 0; r < kRows; ++r) {
    UNROLLED for (int s = 0; s < 2; ++s) SumLanes(sums[r][s]);
  }
  EACH_LANE(lane) {  // lane r finishes row r
    float one = 0, other = 0;
    int pair = 0;
    UNROLLED for (int r = 0; r < kRows; ++r) {
      if (lane == r) one = sums[r][0][lane], other = sums[r][1][lane], pair = pairs[r];
    }
    if (lane < kRows && begin + lane < t.rows) {
      float* out = a.out + (long long)pair * a.outputs + t.output;
      const float scale = a.scale != nullptr ? a.scale[pair] : 1.0f;
      if (a.first[1] >= 0) {
        out[0] = Activate(a, one, other) * scale;
      } else {
        out[0] = one * scale;
        if (t.streams == 2) out[1] = other * scale;
      }
    }
  }
}

template <class Type, bool kWide>
__device__ __forceinline__ void Meet(const Few& a, const Task& t) {
  for (int begin = 0; begin < t.rows; begin += kMost) {
    const int left = t.rows - begin;
    if (left == 1) {
      Multiply<Type, kWide, 1>(a, t, begin);
    } else if (left == 2) {
      Multiply<Type, kWide, 2>(a, t, begin);
    } else {
      Multiply<Type, kWide, kMost>(a, t, begin);
    }
  }
}

// Tasks of a block.
__device__ __forceinline__ int TasksOf(const Few& a) {
  return a.first[1] >= 0 ? a.outputs : (a.outputs + 1) / 2;
}

template <class Type>
__device__ __forceinline__ void Take(const Few& a, int block, int task, bool arrives) {
  const int slot = a.record[block], host = a.absent != nullptr ? a.absent[block] : -1;
  if (slot < 0 || slot >= a.slot_count) return;
  if (arrives ? host >= a.host_count : host >= 0) return;
  Task t;
  t.slot = a.slots + slot * a.record_bytes;
  t.host = arrives ? a.host + host * a.record_bytes : nullptr;
  t.row = a.row != nullptr ? a.row[block] : block;
  t.rows = a.count != nullptr ? a.count[block] : 1;
  const bool is_pair = a.first[1] >= 0;
  t.output = is_pair ? task : 2 * task;
  t.streams = is_pair || t.output + 1 < a.outputs ? 2 : 1;
  UNROLLED for (int s = 0; s < 2; ++s) {
    const int matrix = is_pair ? s : 0, output = is_pair ? task : t.output + s;
    const long long item = sizeof(typename Type::Item), bias = a.bias[matrix];
    t.at[s] = a.first[matrix] + item * output * a.width;
    t.bias[s] = bias < 0 ? -1 : bias + item * output;
  }
  if (a.wide) {
    Meet<Type, true>(a, t);
  } else {
    Meet<Type, false>(a, t);
  }
}

template <class Type>
__device__ __forceinline__ void Run(const Few& a) {
  const int warp = int((blockIdx.x * blockDim.x + threadIdx.x) / kLanes);
  const bool arrives = warp < a.miss_warps;
  const int tasks = TasksOf(a), at = warp - a.miss_warps;
  int block = arrives ? 0 : at / tasks, task = arrives ? warp : at % tasks;
  // Absent experts are the first. Who takes what is there takes one task.
  while (block < a.blocks && (!arrives || a.absent[block] >= 0)) {
    if (task < tasks) Take<Type>(a, block, task, arrives);
    if (!arrives) return;
    task += a.miss_warps;
    if (task >= tasks) task = warp, ++block;
  }
}

}  // namespace few

extern "C" __global__ void __launch_bounds__(128, 4) moe_edge_few_bfloat16(Few a) {
  few::Run<few::Bfloat16>(a);
}

extern "C" __global__ void __launch_bounds__(128, 4) moe_edge_few_float32(Few a) {
  few::Run<few::Float32>(a);
}
