// Attention of a few queries to a cache, one head at a time.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "share.h"
#include "vectors.h"

namespace osd {

// Biases below this mask a position.
constexpr float kMasked = -5e8;

// One head of one row.
struct Head {
  const float *query, *keys, *values, *bias;
  float* context;
  int64_t query_stride, bias_stride;  // from one query to the next
  int64_t queries, size;              // n, D

  // Number of positions up to the last that any query may attend to.
  int64_t Reach(int64_t positions) const {
    int64_t reach = 0;
    for (int64_t n = 0; n < queries; ++n) {
      const float* row = bias + n * bias_stride;
      int64_t end = positions;
      while (end > reach && row[end - 1] < kMasked) --end;
      reach = std::max(reach, end);
    }
    return reach;
  }

  // Turns the scores of one query into unnormalised weights and returns their sum.
  float Weigh(int64_t n, int64_t reach, float* weights) const {
    const float* row = bias + n * bias_stride;
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t t = 0; t < reach; ++t) {
      weights[t] = Dot(query + n * query_stride, keys + t * size, size) + row[t];
      largest = std::max(largest, weights[t]);
    }
    Vector sum = {};
    for (int64_t t = 0; t < reach; t += kLanes) {
      for (int64_t pad = reach; pad < t + kLanes; ++pad) weights[pad] = -1e30f;
      const Vector weight = Exp(Load(weights + t) - largest);
      std::memcpy(weights + t, &weight, sizeof(weight));
      sum += weight;
    }
    return Sum(sum);
  }

  // Weighted sum over the values, `kVectors` vectors of components at a time.
  template <int kVectors>
  void Gather(int64_t n, int64_t reach, const float* weights, float total,
              int64_t first) const {
    Vector sums[kVectors] = {};
    for (int64_t t = 0; t < reach; ++t) {
      for (int v = 0; v < kVectors; ++v) {
        sums[v] += weights[t] * Load(values + t * size + first + v * kLanes);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const Vector mean = sums[v] / total;
      std::memcpy(context + n * query_stride + first + v * kLanes, &mean, sizeof(mean));
    }
  }

  bool IsMasked(int64_t n, int64_t reach) const {
    const float* row = bias + n * bias_stride;
    return std::all_of(row, row + reach, [](float value) { return value < kMasked; });
  }

  void Attend(int64_t positions, float* weights) const {
    const int64_t reach = Reach(positions);
    for (int64_t n = 0; n < queries; ++n) {
      if (IsMasked(n, reach)) {
        std::fill_n(context + n * query_stride, size, 0.0f);
        continue;
      }
      const float total = Weigh(n, reach, weights);
      int64_t first = 0;
      for (; first + 4 * kLanes <= size; first += 4 * kLanes) {
        Gather<4>(n, reach, weights, total, first);
      }
      for (; first + kLanes <= size; first += kLanes) {
        Gather<1>(n, reach, weights, total, first);
      }
      for (; first < size; ++first) {
        float sum = 0;
        for (int64_t t = 0; t < reach; ++t) {
          sum = std::fma(weights[t], values[t * size + first], sum);
        }
        context[n * query_stride + first] = sum / total;
      }
    }
  }
};

// A query that may attend to no position gets zeros, so that padding stays padding.
// query [B, n, H D], keys and values [B, H, T, D], bias [B or 1, H or 1, n or 1, T].
inline ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query,
                  ffi::Buffer<ffi::F32> keys, ffi::Buffer<ffi::F32> values,
                  ffi::Buffer<ffi::F32> bias, ffi::ResultBuffer<ffi::F32> context) {
  const int64_t queries = query.dimensions()[1], joined = query.dimensions()[2];
  const int64_t rows = keys.dimensions()[0], heads = keys.dimensions()[1];
  const int64_t positions = keys.dimensions()[2], size = keys.dimensions()[3];
  int64_t strides[3], stride = positions;  // of the bias: row, head, query
  for (int axis = 2; axis >= 0; --axis) {
    const int64_t extent = bias.dimensions()[axis];
    strides[axis] = extent == 1 ? 0 : stride;
    stride *= extent;
  }
  Share(pool, rows * heads, 2 * positions * size * sizeof(float),
        [&](int64_t begin, int64_t end) {
          std::vector<float> weights(positions + kLanes);
          for (int64_t i = begin; i < end; ++i) {
            const int64_t row = i / heads, head = i % heads;
            const int64_t at = row * queries * joined + head * size;
            const Head one = {
                query.typed_data() + at,
                keys.typed_data() + i * positions * size,
                values.typed_data() + i * positions * size,
                bias.typed_data() + row * strides[0] + head * strides[1],
                context->typed_data() + at,
                joined,
                strides[2],
                queries,
                size,
            };
            one.Attend(positions, weights.data());
          }
        });
  return ffi::Error::Success();
}

}  // namespace osd
