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
#include "topkef.h"

#define TOPKEF_CODES
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

/* As `follow` (updates/updates.h), for whole groups of 32 elements; returns how many those are. A byte's upper
 * half chooses between 16 tables of 16 bytes, each bit between half of them. */
inline int64_t follow_lines(const float *gradient, const uint8_t *rises, uint8_t *codes, uint8_t *before, int64_t n) {
  const auto part = [=](int i) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(rises + 16 * i)));
  };
  const auto came = [=](int64_t i) {
    return _mm256_castps_si256(_mm256_cmp_ps(_mm256_loadu_ps(gradient + i), _mm256_setzero_ps(), _CMP_NEQ_UQ));
  };
  const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi8(1), low = _mm256_set1_epi8(15);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), fades = _mm256_set1_epi16(TOPKEF_FADES_BY);
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes + i));
    const __m256i index = _mm256_and_si256(code, low);
    __m256i up[16];
    for (int j = 0; j < 16; ++j) up[j] = _mm256_shuffle_epi8(part(j), index);
    for (int bit = 4, left = 8; left; ++bit, left /= 2) {
      const __m256i is = _mm256_slli_epi16(code, 7 - bit);  // blends look at the first bit of each byte
      for (int j = 0; j < left; ++j) up[j] = _mm256_blendv_epi8(up[2 * j], up[2 * j + 1], is);
    }
    const __m256i left = _mm256_mulhrs_epi16(_mm256_unpacklo_epi8(code, zero), fades);
    const __m256i right = _mm256_mulhrs_epi16(_mm256_unpackhi_epi8(code, zero), fades);
    const __m256i down = _mm256_subs_epu8(code, _mm256_max_epu8(_mm256_packus_epi16(left, right), one));
    const __m256i first = _mm256_packs_epi32(came(i), came(i + 8));
    const __m256i second = _mm256_packs_epi32(came(i + 16), came(i + 24));
    const __m256i arrives = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(before + i), code);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(codes + i), _mm256_blendv_epi8(down, up[0], arrives));
  }
  return i;
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
