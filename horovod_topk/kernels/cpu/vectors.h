/* What AVX2 and AVX-512 do alike, written once. A file that includes this one first defines
 *
 *     Floats, Integers, Words    vectors of float, int32_t and uint64_t
 *     load_wide, put_wide        from and to elements of any format; to: past the caches
 *     reaching, without          a mask of magnitudes that are not below a limit; elements out of a mask
 *     product32, TURNS           products of the lower halves of words; vectors that take turns
 *
 * Everything is local to the file that includes it. */
#ifndef TOPKEF_VECTORS_H
#define TOPKEF_VECTORS_H

#include <stdint.h>
#include <string.h>

#include "float_formats.h"
#include "passes.h"

#define TOPKEF_LANES
#define TOPKEF_PHILOX
#define TOPKEF_SIGNS

namespace {

constexpr int64_t WIDE = sizeof(Floats) / sizeof(float);

inline void fence() { _mm_sfence(); }

inline bool is_aligned(const void *pointer) { return (uintptr_t)pointer % sizeof(Floats) == 0; }

inline Floats plain(const float *from) {
  Floats found;
  memcpy(&found, from, sizeof found);
  return found;
}

inline void put_plain(float *to, Floats x) { memcpy(to, &x, sizeof x); }

/* The bits of bfloat16 numbers, to nearest, ties to even, in the lower halves. */
inline Integers brains(Floats x) {
  const Unsigned bits = (Unsigned)x, rounded = bits + ((bits >> 16 & 1) + 0x7fff);
  return (Integers)((x == x ? rounded : bits | 0x400000) >> 16);
}

template <class R, class G>
inline uint64_t lanes(const float *e, const G *g, const float *w, float *out, uint32_t least) {
  const bool aligned = is_aligned(out);
  uint64_t found = 0;
  for (int64_t i = 0; i < 64; i += WIDE) {
    const Floats a = load_wide(e + i) + load_wide(g + i);
    const auto is = reaching(w ? a * plain(w + i) : a, least);
    const Floats rest = without(is, a);
    if (aligned)
      put_wide(out + i, rest);
    else
      put_plain(out + i, rest);
    found |= bits_of(is) << i;
  }
  return found;
}

/* Calls each(i) for vectors of n elements, which it stores past the caches; returns how many elements those have. */
template <class G, class Each>
inline int64_t in_lines(const G *to, int64_t n, Each each) {
  if (!is_aligned(to)) return 0;
  int64_t i = 0;
  for (; i + WIDE <= n; i += WIDE) each(i);
  return i;
}

/* Store whole cache lines of a gradient; returns how many elements were stored. */
template <class R, class G>
struct Lines {
  static int64_t stream(float *total, float scale, G *to, int64_t n) {
    return in_lines(to, n, [=](int64_t i) {
      put_wide(to + i, plain(total + i) * scale);
      put_plain(total + i, Floats{});
    });
  }
};

/* Copy whole cache lines with non-temporal stores; returns how many elements were copied. */
inline int64_t stream(const float *from, float *to, int64_t n) {
  return in_lines(to, n, [=](int64_t i) { put_wide(to + i, plain(from + i)); });
}

/* to = from - read in whole cache lines; returns how many elements were stored. */
inline int64_t stream_difference(const float *from, const float *read, float *to, int64_t n) {
  return in_lines(to, n, [=](int64_t i) { put_wide(to + i, plain(from + i) - plain(read + i)); });
}

constexpr int64_t EACH = sizeof(Words) / sizeof(uint64_t), PHILOX = TURNS * EACH;  // blocks computed at once

/* Lanes have a word of each block in their lower half; products ignore the upper half. Several vectors take
 * turns, as each round waits for the products of the round before. */
inline void philox(uint32_t block, const topkef::Key &key, uint32_t *words) {
  Words a[TURNS], b[TURNS], c[TURNS], d[TURNS];
  for (int v = 0; v < TURNS; ++v) {
    a[v] = ORDER + (block + (uint64_t)(EACH * v));
    b[v] = Words{};
    c[v] = Words{} + (uint64_t)key.committed;
    d[v] = c[v] >> 32;
  }
  uint32_t left = key.words[0], right = key.words[1];
  for (int round = 0; round < 10; ++round, left += 0x9E3779B9u, right += 0xBB67AE85u)
    for (int v = 0; v < TURNS; ++v) {
      const Words p = product32(a[v], 0xD2511F53u), q = product32(c[v], 0xCD9E8D57u);
      a[v] = q >> 32 ^ b[v] ^ left;
      c[v] = p >> 32 ^ d[v] ^ right;
      b[v] = q;
      d[v] = p;
    }
  for (int v = 0; v < TURNS; ++v) {
    const Words low = (a[v] & 0xffffffffu) | b[v] << 32, high = (c[v] & 0xffffffffu) | d[v] << 32;
    const Words both[] = {low_pairs(low, high), high_pairs(low, high)};
    memcpy(words + 4 * EACH * v, both, sizeof both);
  }
}

}  // namespace

#endif
