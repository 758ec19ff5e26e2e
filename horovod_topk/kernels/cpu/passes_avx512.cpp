/* AVX-512 (F, BW, DQ, VL): 16 elements at a time. */
#include "passes.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

#define TOPKEF_LANES
#define TOPKEF_PART
#define TOPKEF_POSITIONS
#define TOPKEF_PHILOX
#define TOPKEF_SIGNS
#define TOPKEF_UNITS
#include "float_formats.h"

namespace {

inline void fence() { _mm_sfence(); }

/* Load in two halves, which makes hardware prefetching start earlier than whole cache lines. */
inline __m512 load16(const float *from) {
  __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps(from));
  return _mm512_insertf32x8(low, _mm256_loadu_ps(from + 8), 1);
}
inline __m512 load16(const Half *from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
inline __m512 load16(const Brain *from) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m256i halves(__m512 a) {
  return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline bool is_aligned(const void *pointer) { return ((uintptr_t)pointer & 63u) == 0; }

template <class R, class G>
inline uint64_t lanes(const float *e, const G *g, const float *w, float *out, uint32_t least) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), limit = _mm512_set1_epi32((int)least);
  const bool aligned = is_aligned(out);
  uint64_t found = 0;
  for (int v = 0; v < 4; ++v) {
    __m512 a = _mm512_add_ps(load16(e + 16 * v), load16(g + 16 * v));
    __m512 key = w ? _mm512_mul_ps(a, _mm512_loadu_ps(w + 16 * v)) : a;
    __m512i bits = _mm512_and_si512(_mm512_castps_si512(key), magnitude);
    __mmask16 is = _mm512_cmpge_epu32_mask(bits, limit);
    __m512 rest = _mm512_maskz_mov_ps((__mmask16)~is, a);
    if (aligned)
      _mm512_stream_ps(out + 16 * v, rest);
    else
      _mm512_storeu_ps(out + 16 * v, rest);
    found |= (uint64_t)is << 16 * v;
  }
  return found;
}

inline void put16(float *to, __m512 x) { _mm512_stream_ps(to, x); }
inline void put16(Half *to, __m512 x) {
  _mm256_stream_si256(reinterpret_cast<__m256i *>(to), halves(x));
}
inline void put16(Brain *to, __m512 x) {
  __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  __m256i brains = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  _mm256_stream_si256(reinterpret_cast<__m256i *>(to), brains);
}

/* Store whole cache lines of a gradient; returns how many elements were stored. */
template <class R, class G>
struct Lines {
  static int64_t stream(float *total, float scale, G *to, int64_t n) {
    if (!is_aligned(to)) return 0;
    const __m512 factor = _mm512_set1_ps(scale);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      put16(to + i, _mm512_mul_ps(_mm512_loadu_ps(total + i), factor));
      _mm512_storeu_ps(total + i, _mm512_setzero_ps());
    }
    return i;
  }
};

/* Copy whole cache lines with non-temporal stores; returns how many elements were copied. */
inline int64_t stream(const float *from, float *to, int64_t n) {
  if (!is_aligned(to)) return 0;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
  return i;
}

/* to = from - read in whole cache lines; returns how many elements were stored. */
inline int64_t stream_difference(const float *from, const float *read, float *to, int64_t n) {
  if (!is_aligned(to)) return 0;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    _mm512_stream_ps(to + i, _mm512_sub_ps(_mm512_loadu_ps(from + i), _mm512_loadu_ps(read + i)));
  return i;
}

/* Sixteen bits of a word at a time; numbers written after the last are overwritten, or not read. */
inline void positions(uint64_t word, uint32_t base, uint32_t *to) {
  const __m512i sixteen = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (uint32_t at = 0; at < 64; at += 16) {
    auto bits = (__mmask16)(word >> at);
    __m512i place = _mm512_add_epi32(sixteen, _mm512_set1_epi32((int)(base + at)));
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(bits, place));
    to += __builtin_popcount(bits);
  }
}

/* Weights of 64 elements (weights.h), loaded in two halves as well. */
inline int64_t weigh_lanes(const float *squares, uint32_t least, float *to) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), limit = _mm512_set1_epi32((int)least);
  const __m512i none = _mm512_set1_epi32((int)(Real<float>::one / 4 * 5));
  for (int v = 0; v < 4; ++v) {
    __m512i bits = _mm512_and_si512(_mm512_castps_si512(load16(squares + 16 * v)), magnitude);
    bits = _mm512_srli_epi32(_mm512_max_epu32(bits, limit), 2);
    _mm512_storeu_si512(to + 16 * v, _mm512_sub_epi32(none, bits));
  }
  return 64;
}

/* A bit for each value, in groups of eight: set if it is below 0. */
inline void signs_of(const float *values, int64_t eights, uint8_t *to) {
  for (int64_t i = 0; i < eights; ++i)
    to[i] = _mm256_cmp_ps_mask(_mm256_loadu_ps(values + 8 * i), _mm256_setzero_ps(), _CMP_LT_OQ);
}

/* Part of `units_of`. A product that is rounded down twice gives the multiple, or one less, which the exact
 * remainder shows. Multiples of at most 64 values have an exact sum in a float. */
inline int64_t units_of_lines(const float *values, int64_t count, float largest, int64_t *sum) {
  if (!(largest > 0x1p-80f) || count > 1024) return 0;  // so that no operation underflows
  const __m512 part = _mm512_set1_ps(largest * 0x1p-16f);
  const __m512 inverse = _mm512_div_round_ps(_mm512_set1_ps(1), part, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  __m512 total = _mm512_setzero_ps();
  __m512i more = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512 size = _mm512_abs_ps(_mm512_loadu_ps(values + i));
    const __m512 exact = _mm512_mul_round_ps(size, inverse, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    const __m512 whole = _mm512_roundscale_ps(exact, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_fnmadd_ps(whole, part, size);
    const __mmask16 is_less = _mm512_cmp_ps_mask(rest, part, _CMP_GE_OQ);
    total = _mm512_add_ps(total, whole);
    more = _mm512_mask_sub_epi32(more, is_less, more, _mm512_set1_epi32(-1));
  }
  *sum = _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_cvttps_epi32(total), more));
  return i;
}

/* Write `minus` where a bit is set, else `plus`. */
inline void choose_by(const uint8_t *from, int64_t eights, float plus, float minus, float *to) {
  const __m256 above = _mm256_set1_ps(plus), below = _mm256_set1_ps(minus);
  for (int64_t i = 0; i < eights; ++i)
    _mm256_storeu_ps(to + 8 * i, _mm256_mask_mov_ps(above, from[i], below));
}

constexpr int64_t PHILOX = 16;  // blocks of random numbers computed at once

/* Lanes have a word of each block in their lower half; products ignore the upper half. Two vectors take
 * turns, as each round waits for the products of the round before. */
inline void philox(uint32_t block, const topkef::Key &key, uint32_t *words) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // what unpacking puts in order
  const __m512i one = _mm512_set1_epi64(0xD2511F53u), other = _mm512_set1_epi64(0xCD9E8D57u);
  const __m512i half = _mm512_set1_epi64(0xffffffffu), committed = _mm512_set1_epi64(key.committed);
  __m512i a[2], b[2], c[2], d[2];
  for (int v = 0; v < 2; ++v) {
    a[v] = _mm512_add_epi64(order, _mm512_set1_epi64((int64_t)block + 8 * v));
    b[v] = _mm512_setzero_si512();
    c[v] = committed;
    d[v] = _mm512_srli_epi64(committed, 32);
  }
  uint32_t left = key.words[0], right = key.words[1];
  for (int round = 0; round < 10; ++round, left += 0x9E3779B9u, right += 0xBB67AE85u) {
    const __m512i lefts = _mm512_set1_epi64(left), rights = _mm512_set1_epi64(right);
    for (int v = 0; v < 2; ++v) {
      const __m512i p = _mm512_mul_epu32(a[v], one), q = _mm512_mul_epu32(c[v], other);
      a[v] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(q, 32), b[v], lefts, 0x96);
      c[v] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p, 32), d[v], rights, 0x96);
      b[v] = q;
      d[v] = p;
    }
  }
  for (int v = 0; v < 2; ++v, words += 32) {
    const __m512i low = _mm512_ternarylogic_epi64(half, a[v], _mm512_slli_epi64(b[v], 32), 0xea);
    const __m512i high = _mm512_ternarylogic_epi64(half, c[v], _mm512_slli_epi64(d[v], 32), 0xea);
    _mm512_storeu_si512(words, _mm512_unpacklo_epi64(low, high));
    _mm512_storeu_si512(words + 16, _mm512_unpackhi_epi64(low, high));
  }
}

template <class R>
struct Parting;

/* Sixteen entries at a time, as long as there are sixteen; returns the next position. */
template <class R>
inline int64_t part(Parting<R> *, int64_t from, int64_t, typename Real<R>::Bits) {
  return from;
}
inline int64_t part(Parting<float> *parting, int64_t from, int64_t to, uint32_t least);

}  // namespace

#include "loops.h"

namespace {

inline int64_t part(Parting<float> *parting, int64_t from, int64_t to, uint32_t least) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), infinity = _mm512_set1_epi32(0x7f800000);
  const __m512i limit = _mm512_set1_epi32((int)least);
  int64_t at = from;
  for (; at + 16 <= to; at += 16) {
    __m512i index = _mm512_loadu_si512(parting->index + at);
    __m512i value = _mm512_loadu_si512(parting->value + at);
    __m512i key = _mm512_loadu_si512(parting->key + at);
    __m512i bits = _mm512_min_epu32(_mm512_and_si512(key, magnitude), infinity);
    __mmask16 keep = _mm512_cmpge_epu32_mask(bits, limit);
    __mmask16 ties = _mm512_cmpeq_epu32_mask(bits, limit);
    for (; ties; ties &= (__mmask16)(ties - 1))  // few, or of one magnitude
      if (parting->ties-- <= 0) keep &= (__mmask16)~(ties & -ties);
    int kept = __builtin_popcount(keep);
    auto drop = (__mmask16)~keep;
    _mm512_storeu_si512(parting->dropped->index + parting->dropped->size,
                        _mm512_maskz_compress_epi32(drop, index));
    _mm512_storeu_si512(parting->dropped->value + parting->dropped->size,
                        _mm512_maskz_compress_epi32(drop, value));
    _mm512_storeu_si512(parting->kept_index + parting->kept, _mm512_maskz_compress_epi32(keep, index));
    _mm512_storeu_si512(parting->kept_value + parting->kept, _mm512_maskz_compress_epi32(keep, value));
    if (parting->key != parting->value)
      _mm512_storeu_si512(parting->kept_key + parting->kept, _mm512_maskz_compress_epi32(keep, key));
    parting->kept += kept;
    parting->dropped->size += 16 - kept;
  }
  return at;
}

}  // namespace

namespace topkef {

const Passes *avx512_passes() {
  static const Passes passes = float_table("avx512");
  return &passes;
}

}  // namespace topkef

#else

namespace topkef {
const Passes *avx512_passes() { return nullptr; }
}  // namespace topkef

#endif
