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

  // Lists the positions that a query may attend to, and returns their number.
  int64_t List(int64_t n, int64_t positions, int64_t* at) const {
    const float* row = bias + n * bias_stride;
    int64_t count = 0;
    for (int64_t t = 0; t < positions; ++t) {
      at[count] = t;
      count += row[t] >= kMasked;
    }
    return count;
  }

  // Turns the scores of one query at `count` positions into unnormalised weights and
  // returns their sum.
  float Weigh(int64_t n, const int64_t* at, int64_t count, float* weights) const {
    const float* row = bias + n * bias_stride;
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < count; ++i) {
      const float* key = keys + at[i] * size;
      weights[i] = Dot(query + n * query_stride, key, size) + row[at[i]];
      largest = std::max(largest, weights[i]);
    }
    Vector sum = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int64_t pad = count; pad < i + kLanes; ++pad) weights[pad] = -1e30f;
      const Vector weight = Exp(Load(weights + i) - largest);
      std::memcpy(weights + i, &weight, sizeof(weight));
      sum += weight;
    }
    return Sum(sum);
  }

  // Weighted sum over the values, `kVectors` vectors of components at a time.
  template <int kVectors>
  void Gather(int64_t n, const int64_t* at, int64_t count, const float* weights,
              float total, int64_t first) const {
    Vector sums[kVectors] = {};
    for (int64_t i = 0; i < count; ++i) {
      const float* value = values + at[i] * size + first;
      for (int v = 0; v < kVectors; ++v) {
        sums[v] += weights[i] * Load(value + v * kLanes);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const Vector mean = sums[v] / total;
      std::memcpy(context + n * query_stride + first + v * kLanes, &mean, sizeof(mean));
    }
  }

  void Attend(int64_t positions, int64_t* at, float* weights) const {
    for (int64_t n = 0; n < queries; ++n) {
      const int64_t count = List(n, positions, at);
      if (count == 0) {
        std::fill_n(context + n * query_stride, size, 0.0f);
        continue;
      }
      const float total = Weigh(n, at, count, weights);
      int64_t first = 0;
      for (; first + 4 * kLanes <= size; first += 4 * kLanes) {
        Gather<4>(n, at, count, weights, total, first);
      }
      for (; first + kLanes <= size; first += kLanes) {
        Gather<1>(n, at, count, weights, total, first);
      }
      for (; first < size; ++first) {
        float sum = 0;
        for (int64_t i = 0; i < count; ++i) {
          sum = std::fma(weights[i], values[at[i] * size + first], sum);
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
          std::vector<int64_t> at_position(positions + 1);
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
            one.Attend(positions, at_position.data(), weights.data());
          }
        });
  return ffi::Error::Success();
}

}  // namespace osd
