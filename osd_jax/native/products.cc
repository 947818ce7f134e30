// Products of a decoding step on a CPU: few columns times a large kernel.
//
//   ProductFloat32  y[c, o] = sum_i x[c, i] kernel[o, i]
//   ProductInt8     the same with a kernel of 8 bits and a scale for each of its rows;
//                   x is rounded to 8 bits too, with one scale for each of its rows
//
// Reading the kernel is what a step waits for, so it is read once: some rows of it times
// all columns, while the rows that follow are fetched. How a sum is ordered depends on
// its length alone: a column's result has the same bits whatever is computed beside it,
// in one call or several, with one thread or several.

#include <algorithm>
#include <atomic>
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
constexpr int64_t kAhead = 4096;        // bytes between what is read and what is fetched
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
