// Products of a few columns and a large kernel of float32, bfloat16 or 8-bit weights.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define OSD_VNNI 1
#endif

#include "share.h"
#include "vectors.h"

namespace osd {

// The sums of a tile stay in registers: at most kColumns columns, and as many rows as
// leave registers for the weights and for one column. More columns take several tiles.
#if defined(__AVX512F__)
constexpr int kColumns = 8, kColumnsOfSeveral = 6;
constexpr int TileRows(int64_t columns) { return columns <= 6 ? 4 : 3; }
constexpr int kInt8Rows = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kColumns = 6, kColumnsOfSeveral = 6;
constexpr int TileRows(int64_t columns) { return columns <= 4 ? 3 : 2; }
constexpr int kInt8Rows = 2;
#else
constexpr int kColumns = 4, kColumnsOfSeveral = 4;
constexpr int TileRows(int64_t) { return 2; }
constexpr int kInt8Rows = 2;
#endif
constexpr int kInt8Columns = 4;
constexpr int64_t kAhead = 32768;  // bytes between what is read and what is fetched
constexpr int64_t kResident = 640 * 1024;  // bytes of columns that stay in a fast cache

// Calls `body` with `count` as a compile-time constant, 1 <= count <= kMost.
template <int kMost, typename Body>
void WithConstant(int64_t count, const Body& body) {
  if constexpr (kMost > 1) {
    if (count < kMost) return WithConstant<kMost - 1>(count, body);
  }
  body(std::integral_constant<int, kMost>());
}

// Size of the largest of as few tiles as possible, all of nearly equal size: a tile of
// few columns keeps the processor waiting for its sums.
template <int kMost>
int64_t LargestTile(int64_t columns) {
  const int64_t most = columns <= kMost ? kMost : std::min(kMost, kColumnsOfSeveral);
  const int64_t tiles = (columns + most - 1) / most;
  return (columns + tiles - 1) / tiles;
}

// Calls `body(first, count)` for tiles of at most kMost columns.
template <int kMost, typename Body>
void ForColumns(int64_t columns, const Body& body) {
  const int64_t largest = LargestTile<kMost>(columns);
  for (int64_t first = 0, count; first < columns; first += count) {
    // Of what is left, as many tiles as before with one less.
    const int64_t left = columns - first, tiles = (left + largest - 1) / largest;
    count = (left + tiles - 1) / tiles;
    WithConstant<kMost>(count, [&](auto constant) { body(first, constant); });
  }
}

// Number of columns of `bytes` each that a pass over the kernel multiplies. All passes
// have nearly equal size, of whole tiles.
inline int64_t Pass(int64_t columns, int64_t bytes) {
  const int64_t most =
      std::max<int64_t>(kResident / bytes / kColumnsOfSeveral, 1) * kColumnsOfSeveral;
  const int64_t passes = (columns + most - 1) / most;
  const int64_t size = (columns + passes - 1) / passes;
  return (size + kColumnsOfSeveral - 1) / kColumnsOfSeveral * kColumnsOfSeveral;
}

// Calls `body(row, count)` for tiles of kMost rows, then for the remaining single rows.
template <int kMost, typename Body>
void ForRows(int64_t begin, int64_t end, const Body& body) {
  int64_t row = begin;
  for (; row + kMost <= end; row += kMost) {
    body(row, std::integral_constant<int, kMost>());
  }
  for (; row < end; ++row) body(row, std::integral_constant<int, 1>());
}

// Address of the data kAhead after a tile, or null past the end of the kernel. It is
// prefetched into the second-level cache, because the first is full of inputs, and in the
// order of memory: several rows read in parallel look random to the hardware prefetcher.
template <typename Weight>
const char* Ahead(const Weight* tile, const Weight* end) {
  const char* ahead = reinterpret_cast<const char*>(tile) + kAhead;
  return ahead < reinterpret_cast<const char*>(end) ? ahead : nullptr;
}

// Prefetches `lines` cache lines of 64 bytes.
inline void Fetch(const char* from, int lines) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(from + i * 64, 0, 2);
}

// Numbers of the columns that are not all zero. The others stand for padding and for
// rows without a request: their products are zero, and take no time. `y` [columns, out]
// is zeroed for them.
inline std::vector<int64_t> Present(const float* x, int64_t columns, int64_t in, float* y,
                                    int64_t out) {
  std::vector<int64_t> found;
  for (int64_t c = 0; c < columns; ++c) {
    const float* column = x + c * in;
    if (std::any_of(column, column + in, [](float value) { return value != 0; })) {
      found.push_back(c);
    } else {
      std::fill_n(y + c * out, out, 0.0f);
    }
  }
  return found;
}

// The columns of a tile, interleaved by vectors and padded with zeros, so that they are
// read sequentially. `which` are their numbers.
inline void Interleave(const float* x, const int64_t* which, int64_t columns, int64_t in,
                       float* packed) {
  for (int64_t i = 0; i < in; i += kLanes) {
    for (int64_t c = 0; c < columns; ++c, packed += kLanes) {
      const float* from = x + which[c] * in + i;
      const Vector part = in - i < kLanes ? LoadSome(from, in - i) : Load(from);
      std::memcpy(packed, &part, sizeof(part));
    }
  }
}

template <int kTileRows, int kTileColumns, typename Weight>
void FloatTile(const Weight* kernel, const float* packed, int64_t in, const char* ahead,
               float* y, const int64_t* which, int64_t out) {
  Vector sums[kTileRows][kTileColumns] = {};
  const auto add = [&](const auto& load, int64_t i) {
    Vector weights[kTileRows];
    for (int r = 0; r < kTileRows; ++r) weights[r] = load(kernel + r * in + i);
    for (int c = 0; c < kTileColumns; ++c) {
      const Vector column = InRegister(Load(packed + i * kTileColumns + c * kLanes));
      for (int r = 0; r < kTileRows; ++r) {
        sums[r][c] = MultiplyAdd(weights[r], column, sums[r][c]);
      }
    }
  };
  constexpr int kBytes = kTileRows * sizeof(Weight);  // of one input
  const int64_t whole = in - in % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    if (ahead) Fetch(ahead + i * kBytes, std::max(1, kBytes * kLanes / 64));
    add([](const Weight* from) { return Load(from); }, i);
  }
  if (whole < in) {
    add([&](const Weight* from) { return LoadSome(from, in - whole); }, whole);
  }
  for (int c = 0; c < kTileColumns; ++c) {
    float* to = y + which[c] * out;
    for (int r = 0; r < kTileRows; ++r) to[r] = Sum(sums[r][c]);
  }
}

// The sums of both types of weights have the same order. So the product with bfloat16
// weights has the bits of the product with the same weights in float32.
template <ffi::DataType kType>
ffi::Error FloatProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                        ffi::Buffer<kType> kernel, ffi::ResultBuffer<ffi::F32> y) {
  using Weight = ffi::NativeType<kType>;
  const int64_t in = x.dimensions()[1], out = kernel.dimensions()[0];
  const Weight* weights = kernel.typed_data();
  float* outputs = y->typed_data();
  const std::vector<int64_t> present =
      Present(x.typed_data(), x.dimensions()[0], in, outputs, out);
  const int64_t columns = present.size();
  if (columns == 0) return ffi::Error::Success();
  const int64_t padded = (in + kLanes - 1) / kLanes * kLanes;
  const int64_t pass = Pass(columns, padded * sizeof(float));
  std::vector<float> inputs(columns * padded);
  for (int64_t first = 0; first < columns; first += pass) {
    ForColumns<kColumns>(std::min(pass, columns - first), [&](int64_t tile, auto count) {
      const int64_t column = first + tile;
      Interleave(x.typed_data(), &present[column], count, in, &inputs[column * padded]);
    });
  }
  Share(pool, out, in * sizeof(Weight), [&, columns, in, out](int64_t begin, int64_t end) {
    if (columns == 1) {
      // A float32 kernel in the order of memory needs no help. A row in bfloat16 arrives
      // faster than the additions to a single sum.
      constexpr int kAtOnce = sizeof(Weight) == sizeof(float) ? 1 : 4;
      ForRows<kAtOnce>(begin, end, [&](int64_t row, auto rows) {
        const Weight* tile = weights + row * in;
        FloatTile<decltype(rows)::value, 1>(
            tile, inputs.data(), in,
            kAtOnce == 1 ? nullptr : Ahead(tile, weights + out * in), outputs + row,
            present.data(), out);
      });
      return;
    }
    const auto by_rows = [&](int64_t first, auto at_once) {
      const int64_t count = std::min(pass, columns - first);
      ForRows<decltype(at_once)::value>(begin, end, [&](int64_t row, auto rows) {
        const Weight* tile = weights + row * in;
        ForColumns<kColumns>(count, [&](int64_t column, auto few) {
          FloatTile<decltype(rows)::value, decltype(few)::value>(
              tile, &inputs[(first + column) * padded], in,
              column == 0 ? Ahead(tile, weights + out * in) : nullptr,
              outputs + row, &present[first + column], out);
        });
      });
    };
    for (int64_t first = 0; first < columns; first += pass) {
      const int64_t tile = LargestTile<kColumns>(std::min(pass, columns - first));
      if (TileRows(tile) == TileRows(1)) {
        by_rows(first, std::integral_constant<int, TileRows(1)>());
      } else {
        by_rows(first, std::integral_constant<int, TileRows(kColumns)>());
      }
    }
  });
  return ffi::Error::Success();
}

inline void Widen(const BFloat16* from, int64_t size, float* to) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, size - i);
    const Vector wide = count < kLanes ? LoadSome(from + i, count) : Load(from + i);
    std::memcpy(to + i, &wide, count * sizeof(float));
  }
}

// Widens weights, beginning with number `first`, for a product that XLA computes.
// `after` is not read: the operand makes XLA wait with the float32 copy until the product
// is next.
inline ffi::Error WidenPart(ffi::ThreadPool pool, ffi::AnyBuffer after,
                        ffi::Buffer<ffi::BF16> kernel, ffi::ResultBuffer<ffi::F32> y,
                        int64_t first) {
  const BFloat16* from = kernel.typed_data() + first;
  float* to = y->typed_data();
  const int64_t size = y->element_count(), vectors = (size + kLanes - 1) / kLanes;
  Share(pool, vectors, sizeof(HalfVector), [=](int64_t begin, int64_t end) {
    Widen(from + begin * kLanes, std::min(end * kLanes, size) - begin * kLanes,
          to + begin * kLanes);
  });
  return ffi::Error::Success();
}

// Rows of a table; indices wrap and are clamped as in JAX.
inline ffi::Error Gather(ffi::Buffer<ffi::BF16> table, ffi::Buffer<ffi::S32> rows,
                         ffi::ResultBuffer<ffi::F32> y) {
  const int64_t count = table.dimensions()[0], width = table.dimensions()[1];
  for (size_t i = 0; i < rows.element_count(); ++i) {
    const int64_t given = rows.typed_data()[i];
    const int64_t row =
        std::clamp<int64_t>(given < 0 ? given + count : given, 0, count - 1);
    Widen(table.typed_data() + row * width, width, y->typed_data() + i * width);
  }
  return ffi::Error::Success();
}

#ifdef OSD_VNNI
// The instruction multiplies unsigned by signed bytes. Inputs are stored with an offset,
// whose contribution is subtracted from the sum.
using Input = uint8_t;
constexpr int kOffset = 128;

template <int kTileRows, int kTileColumns>
void Int8Tile(const int8_t* kernel, const Input* x, int64_t in, const char* ahead,
              int32_t* y) {
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
      const __m512i column =
          InRegister(_mm512_maskz_loadu_epi8(some, x + c * in + i));
      for (int r = 0; r < kTileRows; ++r) {
        sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], column, weights[r]);
      }
    }
  };
  const int64_t whole = in - in % 64;
  for (int64_t i = 0; i < whole; i += 64) {
    if (ahead) Fetch(ahead + i * kTileRows, kTileRows);
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
void Int8Tile(const int8_t* kernel, const Input* x, int64_t in, const char* ahead,
              int32_t* y) {
  int32_t sums[kTileRows][kTileColumns] = {};  // exact, in any order
  if (ahead) Fetch(ahead, kTileRows * in / 64);
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

// Rounds x [in] to 8 bits, half to even. Returns the scale, which is NaN if x has a NaN.
inline float Quantize(const float* x, int64_t in, Input* rounded) {
  // Adding and subtracting a number this large rounds to an integer.
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

inline ffi::Error Int8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                ffi::Buffer<ffi::S8> kernel, ffi::Buffer<ffi::F32> scale,
                ffi::ResultBuffer<ffi::F32> y) {
  const int64_t in = x.dimensions()[1], out = kernel.dimensions()[0];
  float* outputs = y->typed_data();
  const std::vector<int64_t> present =
      Present(x.typed_data(), x.dimensions()[0], in, outputs, out);
  const int64_t columns = present.size();
  if (columns == 0) return ffi::Error::Success();
  std::vector<Input> inputs(columns * in);
  std::vector<float> input_scales(columns);
  for (int64_t c = 0; c < columns; ++c) {
    input_scales[c] = Quantize(x.typed_data() + present[c] * in, in, &inputs[c * in]);
  }
  const int8_t* weights = kernel.typed_data();
  const float* scales = scale.typed_data();
  Share(pool, out, in, [&, columns, in, out](int64_t begin, int64_t end) {
    ForRows<kInt8Rows>(begin, end, [&](int64_t row, auto rows) {
      const int8_t* tile = weights + row * in;
      ForColumns<kInt8Columns>(columns, [&](int64_t column, auto count) {
        constexpr int kTileRows = decltype(rows)::value;
        constexpr int kTileColumns = decltype(count)::value;
        int32_t sums[kTileRows][kTileColumns];
        Int8Tile<kTileRows, kTileColumns>(
            tile, &inputs[column * in], in,
            column == 0 ? Ahead(tile, weights + out * in) : nullptr, sums[0]);
        for (int c = 0; c < kTileColumns; ++c) {
          for (int r = 0; r < kTileRows; ++r) {
            outputs[present[column + c] * out + row + r] =
                static_cast<float>(sums[r][c]) * input_scales[column + c] *
                scales[row + r];
          }
        }
      });
    });
  });
  return ffi::Error::Success();
}

}  // namespace osd
