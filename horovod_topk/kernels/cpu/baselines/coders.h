/* Coders that send all elements of a tensor in few bits: one for each method, as its docstring defines.
 *
 * A coder measures a block of elements, writes its scale, and then the codes, tile by tile. Blocks longer
 * than `TILED` are measured in tiles of FOLDED. Elements are float32, finite and within `LIMIT`.
 * Everything is local to the file that includes it. */
#ifndef TOPKEF_CODERS_H
#define TOPKEF_CODERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "baselines/bits.h"
#include "codes.h"
#include "float_formats.h"
#include "passes.h"
#include "random.h"

namespace {

/* For functions that callers compile for their own, known number of elements. */
#define INLINE inline __attribute__((always_inline))

using topkef::Format;
using topkef::Measured;

using topkef::CODED;
using topkef::FOLDED;

/* Divides `count` elements from `at` on into stretches within one block. */
struct Reading {
  int64_t at, count, size, block = 0, from = 0, to = 0;

  Reading(int64_t first, int64_t many, int64_t block_size) : at(first), count(many), size(block_size) {}

  bool next() {
    from = to;
    block = (at + from) / size;
    to = (block + 1) * size - at;
    to = to < count ? to : count;
    return from < count;
  }
};

inline int64_t blocks_of(int64_t total, int64_t block) { return (total + block - 1) / block; }

inline float brain_at(const uint8_t *scales, int64_t i) {
  return widen(load(reinterpret_cast<const Brain *>(scales), i));
}

inline void put_brain(uint8_t *scales, int64_t i, Brain scale) {
  store(reinterpret_cast<Brain *>(scales), i, scale);
}

/* Whether each of `count` bfloat16 numbers is finite and not negative. */
inline bool are_scales(const uint8_t *data, int64_t count) {
  bool all = true;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = load(reinterpret_cast<const uint16_t *>(data), i);
    all &= bits < 0x7f80 || bits == 0x8000;
  }
  return all;
}

/* Half of the power of two to which a tile of at most FOLDED elements is padded. */
inline int64_t half_of(int64_t count) {
  int64_t half = 1;
  while (2 * half < count) half *= 2;
  return half;
}

/* The sum of `size` numbers, which are overwritten: the second half is added to the first, until one is
 * left. Sizes are known at compile time, as short loops would be mostly overhead. */
template <int size>
inline double folded(double *tile) {
  if constexpr (size == 1) {
    return tile[0];
  } else {
    for (int i = 0; i < size / 2; ++i) tile[i] += tile[i + size / 2];
    return folded<size / 2>(tile);
  }
}

/* The sum of term(x) over the first `size` values, in the order of `folded`. */
template <int size, class Term>
inline double folded(const float *values, Term term) {
  static_assert(size >= 8, "the first three foldings are one loop");
  constexpr int part = size / 8;
  alignas(64) double sums[part];
  auto pair = [&](int i) { return term(values[i]) + term(values[i + 4 * part]); };
  for (int i = 0; i < part; ++i)
    sums[i] = (pair(i) + pair(i + 2 * part)) + (pair(i + part) + pair(i + 3 * part));
  return folded<part>(sums);
}

/* The sum of term(x) over a tile of at most FOLDED values, padded with zeros to a power of two; the
 * second half is added to the first, until one is left. */
template <class Term>
inline double folded(const float *values, int64_t count, Term term) {
  alignas(64) float padded[FOLDED];
  const int64_t size = 2 * half_of(count), room = size < 8 ? 8 : size;
  if (count < room) {
    memcpy(padded, values, (size_t)count * sizeof *values);
    memset(padded + count, 0, (size_t)(room - count) * sizeof *values);
    values = padded;
  }
  switch (room) {
    case 8: return folded<8>(values, term);
    case 16: return folded<16>(values, term);
    case 32: return folded<32>(values, term);
    case 64: return folded<64>(values, term);
    case 128: return folded<128>(values, term);
    case 256: return folded<256>(values, term);
    default: return folded<FOLDED>(values, term);
  }
}

/* max(x, 0), and below it max(-x, 0), without comparisons, which would be branches. */
inline double plus_of(float x) {
  const auto bits = bit_cast<int32_t>(x);
  return (double)bit_cast<float>(bits & ~(bits >> 31));
}

inline double minus_of(float x) {
  const auto bits = bit_cast<int32_t>(x);
  return (double)bit_cast<float>(bits & bits >> 31 & 0x7fffffff);
}

inline double same_of(float x) { return (double)x; }

inline double square_of(float x) { return (double)x * (double)x; }

/* The bits of a float as an integer with the same order. */
inline int32_t ordered(float x) {
  const auto bits = bit_cast<int32_t>(x);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

inline float from_ordered(int32_t bits) { return bit_cast<float>(bits ^ (bits >> 31 & 0x7fffffff)); }

/* ByteGrad: 8 bits between the smallest and the largest element of a block, both halved. */
struct MinMax {
  static constexpr int64_t TILED = FOLDED;
  static constexpr float ABOVE = (float)((1 + 0x1p-20) / 255);
  uint8_t *lows, *steps, *codes;
  int64_t block;

  MinMax(uint8_t *data, int64_t total, const Format &format)
      : lows(data), steps(lows + 4 * blocks_of(total, format.block)),
        codes(steps + 4 * blocks_of(total, format.block)), block(format.block) {}

  static int64_t bytes(int64_t total, const Format &format) {
    return 8 * blocks_of(total, format.block) + total;
  }

  static Measured measure(const float *values, int64_t count, float, const Format &) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t value = ordered(values[i]);
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    Measured found;
    found.low = from_ordered(low);
    found.high = from_ordered(high);
    return found;
  }

  struct Scale {
    float low, step;
  };

  Scale put_scale(int64_t i, const Measured &found) {
    const float low = found.low * 0.5f, step = (found.high * 0.5f - low) * ABOVE;
    store(reinterpret_cast<float *>(lows), i, low);
    store(reinterpret_cast<float *>(steps), i, step);
    return {low, step};
  }

  INLINE void write(const float *values, int64_t at, int64_t count, Scale scale, float *read,
                    const uint16_t *) {
    const float low = scale.low, step = scale.step;
    const float divisor = step != 0 ? step : INFINITY;  // all are 0 then
    uint8_t *to = codes + at;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t code = (int32_t)((values[i] * 0.5f - low) / divisor + 0.5f) & 255;
      to[i] = (uint8_t)code;
      read[i] = (low + step * (float)code) * 2;
    }
  }

  void read(int64_t at, int64_t count, float *to) const {
    for (Reading each(at, count, block); each.next();) {
      const float low = load(reinterpret_cast<const float *>(lows), each.block);
      const float step = load(reinterpret_cast<const float *>(steps), each.block);
      for (int64_t i = each.from; i < each.to; ++i) to[i] = (low + step * (float)codes[at + i]) * 2;
    }
  }

  bool is_sound(int64_t total) const {
    bool all = true;
    for (int64_t i = 0; i < blocks_of(total, block); ++i) {
      const float low = load(reinterpret_cast<const float *>(lows), i);
      const float step = load(reinterpret_cast<const float *>(steps), i);
      all &= magnitude_bits(low) < Real<float>::infinity && step >= 0 && step < INFINITY;
    }
    return all;
  }
};

/* What a sign is read as. */
struct SignScale {
  float plus, minus;
};

INLINE void write_signs(const float *values, int64_t at, int64_t count, SignScale scale, uint8_t *codes,
                        float *read) {
  const float plus = scale.plus, minus = scale.minus;
  pack_signs(values, at, count, codes);
  for (int64_t i = 0; i < count; ++i) read[i] = values[i] < 0 ? minus : plus;
}

/* OneBit: the sign, which is read as the mean of the column's elements of that sign. */
struct Means {
  static constexpr int64_t TILED = FOLDED;
  uint8_t *above, *below, *codes;
  int64_t block;

  Means(uint8_t *data, int64_t total, const Format &format)
      : above(data), below(above + 2 * blocks_of(total, format.block)),
        codes(below + 2 * blocks_of(total, format.block)), block(format.block) {}

  static int64_t bytes(int64_t total, const Format &format) {
    return 4 * blocks_of(total, format.block) + (total + 7) / 8;
  }

  static Measured measure(const float *values, int64_t count, float, const Format &) {
    int32_t fewer = 0;
    for (int64_t i = 0; i < count; ++i) fewer += values[i] < 0;
    Measured found;
    found.above = folded(values, count, [](float x) { return plus_of(x); });
    found.below = folded(values, count, [](float x) { return minus_of(x); });
    found.negative = fewer;
    found.count = count;
    return found;
  }

  using Scale = SignScale;

  Scale put_scale(int64_t i, const Measured &found) {
    const Brain high = mean(found.above, found.count - found.negative);
    const Brain low = mean(found.below, found.negative);
    put_brain(above, i, high);
    put_brain(below, i, low);
    return {widen(high), -widen(low)};
  }

  INLINE void write(const float *values, int64_t at, int64_t count, Scale scale, float *read,
                    const uint16_t *) {
    write_signs(values, at, count, scale, codes, read);
  }

  void read(int64_t at, int64_t count, float *to) const {
    for (Reading each(at, count, block); each.next();) {
      const float plus = brain_at(above, each.block), minus = -brain_at(below, each.block);
      unpack_signs(codes, at + each.from, each.to - each.from, plus, minus, to + each.from);
    }
  }

  bool is_sound(int64_t total) const { return are_scales(above, 2 * blocks_of(total, block)); }

 private:
  static Brain mean(double total, int64_t count) {
    return narrow_brain(count ? (float)(total / (double)count) : 0.0f);
  }
};

#ifndef TOPKEF_UNITS
/* Add up whole cache lines; returns how many values were added. */
inline int64_t units_of_lines(const float *, int64_t, float, int64_t *) { return 0; }
#endif

/* The sum of magnitudes of at most `largest`, each rounded down to a multiple of largest / SCALED_UNITS; in
 * such multiples. `largest` has the 8 bits of a bfloat16. */
inline int64_t units_of(const float *values, int64_t count, float largest) {
  int64_t lines = 0;
  const int64_t done = units_of_lines(values, count, largest, &lines);
  // The quotient of a float and a bfloat16 is an integer number of parts, or at least 2^-24 from one.
  const double parts = largest > 0 ? SCALED_UNITS / (double)largest * (1 + 0x1p-40) : 0;
  int32_t total = 0;
  for (int64_t i = done; i < count; ++i)
    total += (int32_t)((double)bit_cast<float>(magnitude_bits(values[i])) * parts);
  return lines + total;
}

/* SignSGD: the sign, times the mean magnitude of the block, which is computed from integers. */
struct Signs {
  static constexpr int64_t block = 1024, TILED = block;
  uint8_t *scales, *codes;

  Signs(uint8_t *data, int64_t total, const Format &)
      : scales(data), codes(data + scale_bytes(topkef::SIGN, total)) {}

  static int64_t bytes(int64_t total, const Format &) {
    return scale_bytes(topkef::SIGN, total) + (total + 7) / 8;
  }

  static Measured measure(const float *values, int64_t count, float largest, const Format &) {
    const float unit = widen(scale_above(largest));
    const int64_t total = units_of(values, count, unit);
    Measured found;
    found.above = (double)unit * ((double)total / ((double)SCALED_UNITS * (double)count));
    return found;
  }

  using Scale = SignScale;

  Scale put_scale(int64_t i, const Measured &found) {
    const Brain bits = narrow_brain((float)found.above);
    put_brain(scales, i, bits);
    return {widen(bits), -widen(bits)};
  }

  INLINE void write(const float *values, int64_t at, int64_t count, Scale scale, float *read,
                    const uint16_t *) {
    write_signs(values, at, count, scale, codes, read);
  }

  void read(int64_t at, int64_t count, float *to) const {
    for (Reading each(at, count, block); each.next();) {
      const float plus = brain_at(scales, each.block), minus = -plus;
      unpack_signs(codes, at + each.from, each.to - each.from, plus, minus, to + each.from);
    }
  }

  bool is_sound(int64_t total) const { return are_scales(scales, blocks_of(total, block)); }
};

/* QSGD: a level of the block's norm, drawn so that its mean is the element. */
template <bool is_l2>
struct Dithered {
  static constexpr int64_t TILED = FOLDED;
  static constexpr double ABOVE = 1 + 0x1p-20;
  uint8_t *steps, *codes;
  int64_t block, bits;
  int32_t levels;

  Dithered(uint8_t *data, int64_t total, const Format &format)
      : steps(data), codes(data + 2 * blocks_of(total, format.block)), block(format.block),
        bits(format.bits), levels((1 << (bits - 1)) - 1) {}

  static int64_t bytes(int64_t total, const Format &format) {
    return 2 * blocks_of(total, format.block) + (total * format.bits + 7) / 8;
  }

  static Measured measure(const float *values, int64_t count, float largest, const Format &) {
    Measured found;
    if (!is_l2) {
      found.high = largest;
      return found;
    }
    found.above = folded(values, count, [](float x) { return square_of(x); });
    return found;
  }

  struct Scale {
    float step;
  };

  Scale put_scale(int64_t i, const Measured &found) {
    const double exact_norm = is_l2 ? sqrt(found.above) : (double)found.high;
    const auto norm = (float)(exact_norm < LIMIT ? exact_norm : LIMIT);
    const Brain rounded = scale_above(norm * (float)(ABOVE / levels));
    put_brain(steps, i, rounded);
    return {widen(rounded)};
  }

  INLINE void write(const float *values, int64_t at, int64_t count, Scale scale, float *read,
                    const uint16_t *drawn) {
    const float step = scale.step, divisor = step != 0 ? step : INFINITY;
    alignas(64) uint8_t code[CODED];
    for (int64_t i = 0; i < count; ++i) {
      const float exact = bit_cast<float>(magnitude_bits(values[i])) / divisor;
      const auto level = (int32_t)(exact + ((float)drawn[i] + 0.5f) * 0x1p-16f);
      const int32_t multiple = values[i] < 0 ? -level : level;
      code[i] = (uint8_t)(multiple + levels);
      read[i] = step * (float)multiple;
    }
    pack_bits(code, at, count, bits, codes);
  }

  void read(int64_t at, int64_t count, float *to) const {
    uint8_t code[CODED];
    unpack_bits(codes, at, count, bits, code);
    for (Reading each(at, count, block); each.next();) {
      const float step = brain_at(steps, each.block);
      for (int64_t i = each.from; i < each.to; ++i) to[i] = step * (float)((int32_t)code[i] - levels);
    }
  }

  bool is_sound(int64_t total) const {
    return are_scales(steps, blocks_of(total, block)) && !has_largest(codes, total, bits);
  }
};

/* TernGrad: -1, 0 or 1 times the scale of the tensor, drawn so that the mean is the element. Blocks are
 * whole tensors. Five codes share a byte, so spans are written in ascending order by one thread, or
 * begin at multiples of five. */
struct Ternary {
  static constexpr int64_t TILED = FOLDED;
  static constexpr int64_t DIGITS = 5, LARGEST = 242;  // codes in a byte, and the largest byte of all five
  uint8_t *scale, *codes;
  int64_t block;

  Ternary(uint8_t *data, int64_t, const Format &format)
      : scale(data), codes(data + sizeof(float)), block(format.block) {}

  static int64_t bytes(int64_t total, const Format &) {
    return (int64_t)sizeof(float) + (total + DIGITS - 1) / DIGITS;
  }

  /* The largest magnitude, the sum, and the sum of squares. */
  static Measured measure(const float *values, int64_t count, float largest, const Format &) {
    Measured found;
    found.high = largest;
    found.below = folded(values, count, [](float x) { return same_of(x); });
    found.above = folded(values, count, [](float x) { return square_of(x); });
    return found;
  }

  struct Scale {
    float limit, unit;
  };

  /* Magnitudes are clipped to `found.low`; `found.high` is the scale. */
  Scale put_scale(int64_t, const Measured &found) {
    store(reinterpret_cast<float *>(scale), 0, found.high);
    return {found.low, found.high};
  }

  INLINE void write(const float *values, int64_t at, int64_t count, Scale found, float *read,
                    const uint16_t *drawn) {
    const float limit = found.limit, unit = found.unit, part = unit * 0x1p-16f;
    const int64_t before = at % DIGITS;  // elements of the first byte that are written
    alignas(64) uint8_t code[CODED + 2 * DIGITS + 8];
    memset(code, 0, (size_t)before);
    for (int64_t i = 0; i < count; ++i) {
      const float exact = bit_cast<float>(magnitude_bits(values[i]));
      const float clipped = exact < limit ? exact : limit;
      const int32_t is_sent = ((float)drawn[i] + 0.5f) * part < clipped;
      const int32_t multiple = values[i] < 0 ? -is_sent : is_sent;
      code[before + i] = (uint8_t)(multiple + 1);
    }
    for (int64_t i = 0; read && i < count; ++i) read[i] = unit * (float)(code[before + i] - 1);
    memset(code + before + count, 0, DIGITS + 8);
    uint8_t *to = codes + at / DIGITS;
    const uint8_t first = before ? to[0] : 0;
    const int64_t many = (before + count + DIGITS - 1) / DIGITS;
    for (int64_t i = 0; i < many; ++i) to[i] = packed(code + DIGITS * i);
    to[0] = (uint8_t)(to[0] + first);
  }

  void read(int64_t at, int64_t count, float *to) const {
    alignas(64) int8_t multiple[CODED + 2 * DIGITS + 8];
    const float unit = load(reinterpret_cast<const float *>(scale), 0);
    const int64_t before = at % DIGITS;
    const uint8_t *from = codes + at / DIGITS;
    const int64_t many = (before + count + DIGITS - 1) / DIGITS;
    for (int64_t i = 0; i < many; ++i) memcpy(multiple + DIGITS * i, MULTIPLES.of[from[i]], 8);
    for (int64_t i = 0; i < count; ++i) to[i] = unit * (float)multiple[before + i];
  }

  bool is_sound(int64_t total) const {
    const float unit = load(reinterpret_cast<const float *>(scale), 0);
    bool all = unit >= 0 && unit < INFINITY;
    for (int64_t i = 0; i < total / DIGITS; ++i) all &= codes[i] <= LARGEST;
    return all;
  }

 private:
  /* The five multiples in each byte; later writes overwrite the padding after the fifth. */
  struct Multiples {
    int8_t of[256][8] = {};

    constexpr Multiples() {
      for (int byte = 0; byte < 256; ++byte) {
        int rest = byte;
        for (int i = 0; i < DIGITS; ++i, rest /= 3) of[byte][i] = (int8_t)((i == 4 ? rest : rest % 3) - 1);
      }
    }
  };
  static const Multiples MULTIPLES;

  /* Packs five codes into a byte, in base 3, by one multiplication; no other column overflows. */
  static uint8_t packed(const uint8_t *code) {
    uint64_t five;
    memcpy(&five, code, sizeof five);  // of which the product's column has the first five
    return (uint8_t)(five * (81 + (27 << 8) + (9 << 16) + (3 << 24) + (uint64_t{1} << 32)) >> 32);
  }
};

constexpr Ternary::Multiples Ternary::MULTIPLES{};

}  // namespace

#endif
