// What a decoding step computes on a CPU: few columns times large kernels, few queries
// attending to a cache.
//
//   ProductFloat32  y[c, o] = sum_i x[c, i] kernel[o, i]
//   ProductInt8     the same with a kernel of 8 bits and a scale for each of its rows;
//                   x is rounded to 8 bits too, with one scale for each of its rows
//   Attention       softmax(query keys^T + bias) values, for each head
//
// Reading the kernel is what a step waits for, so it is read once: some rows of it times
// all columns, while the rows that follow are fetched. How a sum is ordered depends on
// its length alone: a column's result has the same bits whatever is computed beside it,
// in one call or several, with one thread or several.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define OSD_VNNI 1
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kColumns = 8;  // of a tile: the sums of kRows x kColumns stay in registers
#else
constexpr int kLanes = 8;
constexpr int kColumns = 4;
#endif
constexpr int kRows = 2;
constexpr int64_t kAhead = 8192;        // bytes between what is read and what is fetched
constexpr int64_t kShare = 128 * 1024;  // bytes of a kernel that are worth a thread

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVector __attribute__((vector_size(kLanes * sizeof(int32_t))));

Vector Load(const float* from) {
  Vector found;
  std::memcpy(&found, from, sizeof(found));
  return found;
}

// The first `count` numbers, and zeros behind them.
Vector LoadSome(const float* from, int64_t count) {
  Vector found = {};
  std::memcpy(&found, from, count * sizeof(float));
  return found;
}

// Pairwise, in an order that is always the same.
float Sum(Vector vector) {
  float lanes[kLanes];
  std::memcpy(lanes, &vector, sizeof(lanes));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Calls `body` with `count` as a constant of the compiler, 1 <= count <= kMost.
template <int kMost, typename Body>
void WithConstant(int64_t count, const Body& body) {
  if constexpr (kMost > 1) {
    if (count < kMost) return WithConstant<kMost - 1>(count, body);
  }
  body(std::integral_constant<int, kMost>());
}

// Calls `body(first, count)` for tiles of at most kColumns columns.
template <typename Body>
void ForColumns(int64_t columns, const Body& body) {
  for (int64_t first = 0; first < columns; first += kColumns) {
    WithConstant<kColumns>(std::min<int64_t>(columns - first, kColumns),
                           [&](auto count) { body(first, count); });
  }
}

// Calls `body(row, count)` for tiles of kRows rows, then for single ones.
template <typename Body>
void ForRows(int64_t begin, int64_t end, const Body& body) {
  int64_t row = begin;
  for (; row + kRows <= end; row += kRows) {
    body(row, std::integral_constant<int, kRows>());
  }
  for (; row < end; ++row) body(row, std::integral_constant<int, 1>());
}

// Runs `work(begin, end)` over all rows, shared with the threads of XLA. Nobody waits
// for a thread that has not begun: whoever is free takes the next part.
void Share(ffi::ThreadPool& pool, int64_t rows, int64_t row_bytes,
           std::function<void(int64_t, int64_t)> work) {
  const int64_t threads =
      std::min<int64_t>(pool.num_threads(), rows * row_bytes / kShare);
  if (threads <= 1) return work(0, rows);
  struct Parts {
    std::function<void(int64_t, int64_t)> work;
    int64_t rows, size, count;
    std::atomic<int64_t> taken{0}, done{0};
    void Run() {
      for (int64_t part = taken++; part < count; part = taken++) {
        work(part * size, std::min(rows, (part + 1) * size));
        ++done;
      }
    }
  };
  auto parts = std::make_shared<Parts>();
  parts->work = std::move(work);
  parts->rows = rows;
  parts->size = (rows / (2 * threads) / kRows + 1) * kRows;
  parts->count = (rows + parts->size - 1) / parts->size;
  for (int64_t i = 1; i < threads; ++i) {
    pool.Schedule([parts] { parts->Run(); });
  }
  parts->Run();
  while (parts->done < parts->count) std::this_thread::yield();
}

template <int kTileRows, int kTileColumns>
void Float32Tile(const float* kernel, const float* x, int64_t in, bool fetch, float* y,
                 int64_t out) {
  Vector sums[kTileRows][kTileColumns] = {};
  const auto add = [&](const auto& load, int64_t i) {
    Vector weights[kTileRows];
    for (int r = 0; r < kTileRows; ++r) weights[r] = load(kernel + r * in + i);
    for (int c = 0; c < kTileColumns; ++c) {
      const Vector column = load(x + c * in + i);
      for (int r = 0; r < kTileRows; ++r) sums[r][c] += weights[r] * column;
    }
  };
  const int64_t whole = in - in % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    if (fetch) {
      for (int r = 0; r < kTileRows; ++r) {
        __builtin_prefetch(kernel + r * in + i + kAhead / sizeof(float));
      }
    }
    add(Load, i);
  }
  if (whole < in) {
    add([&](const float* from) { return LoadSome(from, in - whole); }, whole);
  }
  for (int r = 0; r < kTileRows; ++r) {
    for (int c = 0; c < kTileColumns; ++c) y[c * out + r] = Sum(sums[r][c]);
  }
}

ffi::Error Float32(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                   ffi::Buffer<ffi::F32> kernel, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t columns = x.dimensions()[0], in = x.dimensions()[1];
  const int64_t out = kernel.dimensions()[0];
  const float* inputs = x.typed_data();
  const float* weights = kernel.typed_data();
  float* outputs = y->typed_data();
  Share(pool, out, in * sizeof(float), [=](int64_t begin, int64_t end) {
    ForRows(begin, end, [&](int64_t row, auto rows) {
      ForColumns(columns, [&](int64_t column, auto count) {
        Float32Tile<decltype(rows)::value, decltype(count)::value>(
            weights + row * in, inputs + column * in, in, column == 0,
            outputs + column * out + row, out);
      });
    });
  });
  return ffi::Error::Success();
}

#ifdef OSD_VNNI
// The instruction multiplies unsigned by signed bytes: inputs are stored with an offset,
// whose share in the sum is taken off again.
using Input = uint8_t;
constexpr int kOffset = 128;

template <int kTileRows, int kTileColumns>
void Int8Tile(const int8_t* kernel, const Input* x, int64_t in, bool fetch, int32_t* y) {
  __m512i sums[kTileRows][kTileColumns], offsets[kTileRows];
  for (int r = 0; r < kTileRows; ++r) {
    offsets[r] = _mm512_setzero_si512();
    for (int c = 0; c < kTileColumns; ++c) sums[r][c] = _mm512_setzero_si512();
  }
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(kOffset));
  const auto add = [&](__mmask64 some, int64_t i) {
    __m512i weights[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      weights[r] = _mm512_maskz_loadu_epi8(some, kernel + r * in + i);
      offsets[r] = _mm512_dpbusd_epi32(offsets[r], offset, weights[r]);
    }
    for (int c = 0; c < kTileColumns; ++c) {
      const __m512i column = _mm512_maskz_loadu_epi8(some, x + c * in + i);
      for (int r = 0; r < kTileRows; ++r) {
        sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], column, weights[r]);
      }
    }
  };
  const int64_t whole = in - in % 64;
  for (int64_t i = 0; i < whole; i += 64) {
    if (fetch) {
      for (int r = 0; r < kTileRows; ++r) {
        __builtin_prefetch(kernel + r * in + i + kAhead);
      }
    }
    add(~__mmask64{0}, i);
  }
  if (whole < in) add((__mmask64{1} << (in - whole)) - 1, whole);
  for (int r = 0; r < kTileRows; ++r) {
    for (int c = 0; c < kTileColumns; ++c) {
      const __m512i sum = _mm512_sub_epi32(sums[r][c], offsets[r]);
      y[r * kTileColumns + c] = _mm512_reduce_add_epi32(sum);
    }
  }
}
#else
using Input = int16_t;  // products of 16 bits that add pairs are what most have
constexpr int kOffset = 0;

template <int kTileRows, int kTileColumns>
void Int8Tile(const int8_t* kernel, const Input* x, int64_t in, bool fetch, int32_t* y) {
  int32_t sums[kTileRows][kTileColumns] = {};  // exact, in any order
  if (fetch) {
    for (int64_t i = 0; i < kTileRows * in; i += 64) {
      __builtin_prefetch(kernel + i + kAhead);
    }
  }
  for (int64_t i = 0; i < in; ++i) {
    for (int r = 0; r < kTileRows; ++r) {
      for (int c = 0; c < kTileColumns; ++c) {
        const int16_t weight = kernel[r * in + i];
        sums[r][c] += int32_t{weight} * int32_t{x[c * in + i]};
      }
    }
  }
  std::memcpy(y, sums, sizeof(sums));
}
#endif

typedef Input InputVector __attribute__((vector_size(kLanes * sizeof(Input))));

// Rounds x [in] to 8 bits, half to even; returns its scale, NaN if x has one.
float Quantize(const float* x, int64_t in, Input* rounded) {
  // Adding and taking it off leaves no room for a fraction.
  const Vector no_fraction = Vector{} + 0x1.8p23f;
  Vector largest = {};
  IntVector broken = {};
  const auto some = [&](int64_t i) {
    return in - i < kLanes ? LoadSome(x + i, in - i) : Load(x + i);
  };
  for (int64_t i = 0; i < in; i += kLanes) {
    const Vector values = some(i);
    const Vector size = values < 0 ? -values : values;
    largest = largest > size ? largest : size;
    broken |= values != values;
  }
  float most = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    most = std::max(most, largest[lane]);
    if (broken[lane]) return std::numeric_limits<float>::quiet_NaN();
  }
  const float scale = most == 0 ? 1.0f : most / 127;
  for (int64_t i = 0; i < in; i += kLanes) {
    const Vector whole = (some(i) / scale + no_fraction) - no_fraction;
    const IntVector offset = __builtin_convertvector(whole, IntVector) + kOffset;
    const InputVector inputs = __builtin_convertvector(offset, InputVector);
    std::memcpy(rounded + i, &inputs,
                std::min<int64_t>(kLanes, in - i) * sizeof(Input));
  }
  return scale;
}

ffi::Error Int8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                ffi::Buffer<ffi::S8> kernel, ffi::Buffer<ffi::F32> scale,
                ffi::ResultBuffer<ffi::F32> y) {
  const int64_t columns = x.dimensions()[0], in = x.dimensions()[1];
  const int64_t out = kernel.dimensions()[0];
  std::vector<Input> inputs(columns * in);
  std::vector<float> input_scales(columns);
  for (int64_t c = 0; c < columns; ++c) {
    input_scales[c] = Quantize(x.typed_data() + c * in, in, &inputs[c * in]);
  }
  const int8_t* weights = kernel.typed_data();
  const float* scales = scale.typed_data();
  float* outputs = y->typed_data();
  Share(pool, out, in, [&, columns, in, out](int64_t begin, int64_t end) {
    ForRows(begin, end, [&](int64_t row, auto rows) {
      ForColumns(columns, [&](int64_t column, auto count) {
        constexpr int kTileRows = decltype(rows)::value;
        constexpr int kTileColumns = decltype(count)::value;
        int32_t sums[kTileRows][kTileColumns];
        Int8Tile<kTileRows, kTileColumns>(weights + row * in, &inputs[column * in], in,
                                          column == 0, sums[0]);
        for (int c = 0; c < kTileColumns; ++c) {
          for (int r = 0; r < kTileRows; ++r) {
            outputs[(column + c) * out + row + r] =
                static_cast<float>(sums[r][c]) * input_scales[column + c] *
                scales[row + r];
          }
        }
      });
    });
  });
  return ffi::Error::Success();
}

// e^x, to some 2e-7 of it; 0 where that is below what float32 stores in full.
Vector Exp(Vector x) {
  const Vector round = Vector{} + 0x1.8p23f;
  const Vector power = (x * 0x1.715476p0f + round) - round;  // x / log(2)
  const Vector rest = (x - power * 0x1.62e4p-1f) - power * 0x1.7f7d1cp-20f;
  Vector value = Vector{} + 1.0f / 5040;
  for (const float over : {720.0f, 120.0f, 24.0f, 6.0f, 2.0f, 1.0f, 1.0f}) {
    value = value * rest + 1 / over;
  }
  const IntVector exponent = (__builtin_convertvector(power, IntVector) + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &exponent, sizeof(scale));
  return x < -87.0f ? Vector{} : value * scale;
}

float Dot(const float* left, const float* right, int64_t size) {
  Vector sum = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sum += Load(left + i) * Load(right + i);
  if (i < size) sum += LoadSome(left + i, size - i) * LoadSome(right + i, size - i);
  return Sum(sum);
}

// What is added to a masked score is below; it leaves no weight.
constexpr float kMasked = -5e8;

// One head of one row.
struct Head {
  const float *query, *keys, *values, *bias;
  float* context;
  int64_t query_stride, bias_stride;  // from one query to the next
  int64_t queries, size;              // n, D

  // How many of the first positions hold all that is not masked; all if none is.
  int64_t Reach(int64_t positions) const {
    int64_t reach = 0;
    for (int64_t n = 0; n < queries; ++n) {
      const float* row = bias + n * bias_stride;
      int64_t end = positions;
      while (end > reach && row[end - 1] < kMasked) --end;
      reach = std::max(reach, end);
    }
    return reach == 0 ? positions : reach;
  }

  // Scores of one query, turned into weights; returns their sum.
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

  // The weighted sum of `kVectors` vectors of every value.
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

  void Attend(int64_t positions, float* weights) const {
    const int64_t reach = Reach(positions);
    for (int64_t n = 0; n < queries; ++n) {
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

// query [B, n, H D], keys and values [B, H, T, D], bias [B or 1, H or 1, n or 1, T].
ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query,
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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ProductFloat32, Float32,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProductInt8, Int8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Attention, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
