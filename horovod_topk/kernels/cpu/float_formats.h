/* Float formats and their bits. Everything is local to the file that includes it: files compiled for
 * different instruction sets must not share functions that the linker would merge. */
#ifndef TOPKEF_FLOAT_FORMATS_H
#define TOPKEF_FLOAT_FORMATS_H

#include <stdint.h>
#include <string.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

struct Half {
  uint16_t bits;
};  // IEEE 754 binary16

struct Brain {
  uint16_t bits;
};  // bfloat16: the upper half of a float

template <class R>
struct Real;

template <>
struct Real<float> {
  using Bits = uint32_t;
  static constexpr Bits magnitude = 0x7fffffffu;
  static constexpr Bits infinity = 0x7f800000u, octave = 1u << 23, one = 0x3f800000u;
};

template <>
struct Real<double> {
  using Bits = uint64_t;
  static constexpr Bits magnitude = 0x7fffffffffffffffu;
  static constexpr Bits infinity = 0x7ff0000000000000u, octave = (Bits)1 << 52,
                        one = 0x3ff0000000000000u;
};

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

/* Load or store an element at any alignment. */
template <class T>
inline T load(const T *from, int64_t at = 0) {
  T value;
  memcpy(&value, reinterpret_cast<const char *>(from) + at * (int64_t)sizeof(T), sizeof value);
  return value;
}

template <class T>
inline void store(T *to, int64_t at, T value) {
  memcpy(reinterpret_cast<char *>(to) + at * (int64_t)sizeof(T), &value, sizeof value);
}

/* |x| as an integer with the same order; NaN is above infinity. */
template <class R>
inline typename Real<R>::Bits magnitude_bits(R x) {
  return bit_cast<typename Real<R>::Bits>(x) & Real<R>::magnitude;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(Brain x) { return bit_cast<float>((uint32_t)x.bits << 16); }

#ifdef __F16C__
inline float widen(Half x) { return _cvtsh_ss(x.bits); }

/* To nearest, ties to even. */
inline Half narrow_half(float x) { return {_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)}; }
#else
inline float widen(Half x) {
  uint32_t sign = (uint32_t)(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x0400u) return bit_cast<float>(sign | ((rest << 13) + 0x38000000u));
  float tiny = (float)rest * 0x1p-24f;  // exact, and a normal float
  return bit_cast<float>(sign | bit_cast<uint32_t>(tiny));
}

/* To nearest, ties to even. */
inline Half narrow_half(float x) {
  uint32_t bits = bit_cast<uint32_t>(x), rest = bits & 0x7fffffffu;
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
  if (rest > 0x7f800000u) return {(uint16_t)(sign | 0x7e00u)};
  if (rest >= 0x477ff000u) return {(uint16_t)(sign | 0x7c00u)};
  if (rest < 0x38800000u) {  // a denormal half: a float addition rounds it correctly
    float shifted = bit_cast<float>(rest) + 0.5f;
    return {(uint16_t)(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  uint32_t rounded = rest + 0xfffu + (rest >> 13 & 1u);
  return {(uint16_t)(sign | ((rounded - 0x38000000u) >> 13))};
}
#endif

inline Brain narrow_brain(float x) {
  uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {(uint16_t)(bits >> 16 | 0x40u)};
  return {(uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <class G>
inline G narrow(double x);
template <>
inline float narrow<float>(double x) {
  return (float)x;
}
template <>
inline double narrow<double>(double x) {
  return x;
}
template <>
inline Half narrow<Half>(double x) {
  return narrow_half((float)x);
}
template <>
inline Brain narrow<Brain>(double x) {
  return narrow_brain((float)x);
}

/* Round a value to the format in which it is sent, saturated at the largest finite magnitude. */
template <class V, class R>
struct Sent;

template <class R>
struct Sent<Half, R> {
  static Half of(R x) {
    R limited = x < (R)-65504 ? (R)-65504 : x > (R)65504 ? (R)65504 : x;
    return narrow_half((float)limited);
  }
};

template <class R>
struct Sent<Brain, R> {
  static Brain of(R x) {
    const R most = (R)0x1.fep127f;
    R limited = x < -most ? -most : x > most ? most : x;
    return narrow_brain((float)limited);
  }
};

}  // namespace

#endif
