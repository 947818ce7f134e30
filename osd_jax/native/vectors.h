// Vectors of floats in the width of the processor.

#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace osd {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVector __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint16_t HalfVector __attribute__((vector_size(kLanes * sizeof(uint16_t))));
typedef uint32_t BitVector __attribute__((vector_size(kLanes * sizeof(uint32_t))));

// A bfloat16 is the upper half of the float32 of the same value, so widening is exact.
using BFloat16 = uint16_t;

inline Vector Widened(HalfVector halves) {
#if defined(__AVX512F__)
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)halves), 16);
#elif defined(__AVX2__)
  return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)halves), 16);
#else
  return (Vector)(__builtin_convertvector(halves, BitVector) << 16);
#endif
}

inline Vector Load(const float* from) {
  Vector found;
  std::memcpy(&found, from, sizeof(found));
  return found;
}

inline Vector Load(const BFloat16* from) {
  HalfVector found;
  std::memcpy(&found, from, sizeof(found));
  return Widened(found);
}

// Loads the first `count` numbers; the others are zero.
inline Vector LoadSome(const float* from, int64_t count) {
  Vector found = {};
  std::memcpy(&found, from, count * sizeof(float));
  return found;
}

inline Vector LoadSome(const BFloat16* from, int64_t count) {
  HalfVector found = {};
  std::memcpy(&found, from, count * sizeof(BFloat16));
  return Widened(found);
}

// Hides from the compiler that the values are also in memory. Otherwise it would load
// them again for every product, and loads are the bottleneck here.
template <typename Any>
Any InRegister(Any vector) {
#if defined(__x86_64__)
  asm("" : "+v"(vector));
#endif
  return vector;
}

// left * right + sum, rounded once. Explicit, because a compiler's choice to fuse the two
// depends on the surrounding code, and the bits of a sum must not.
inline Vector MultiplyAdd(Vector left, Vector right, Vector sum) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)left, (__m512)right, (__m512)sum);
#elif defined(__FMA__)
  return (Vector)_mm256_fmadd_ps((__m256)left, (__m256)right, (__m256)sum);
#else
  return left * right + sum;
#endif
}

typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));

// First half plus second half.
template <typename Half, typename Whole>
Half Folded(const Whole& whole) {
  Half halves[2];
  static_assert(sizeof(halves) == sizeof(whole), "two halves make a whole");
  std::memcpy(halves, &whole, sizeof(halves));
  return halves[0] + halves[1];
}

// Sums pairwise, always in the same order.
inline float Sum(Vector vector) {
#if defined(__AVX512F__)
  const Eight eight = Folded<Eight>(vector);
#else
  const Eight eight = vector;
#endif
  const Four four = Folded<Four>(eight);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// e^x with a relative error of about 2e-7; 0 where the result would be subnormal.
inline Vector Exp(Vector x) {
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

inline float Dot(const float* left, const float* right, int64_t size) {
  Vector sum = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    sum = MultiplyAdd(Load(left + i), Load(right + i), sum);
  }
  if (i < size) {
    sum = MultiplyAdd(LoadSome(left + i, size - i), LoadSome(right + i, size - i), sum);
  }
  return Sum(sum);
}

}  // namespace osd
