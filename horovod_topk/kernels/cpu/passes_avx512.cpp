/* AVX-512 (F, BW, DQ, VL): 16 elements at a time. */
#include "passes.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

#define TOPKEF_PART
#define TOPKEF_POSITIONS
#define TOPKEF_UNITS
#include "float_formats.h"

namespace {

typedef __m512 Floats;
typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint32_t Unsigned __attribute__((vector_size(64)));
typedef uint64_t Words __attribute__((vector_size(64)));

/* Load in two halves, which makes hardware prefetching start earlier than whole cache lines. */
inline __m512 load_wide(const float *from) {
  __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps(from));
  return _mm512_insertf32x8(low, _mm256_loadu_ps(from + 8), 1);
}
inline __m512 load_wide(const Half *from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
inline __m512 load_wide(const Brain *from) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __mmask16 reaching(__m512 key, uint32_t least) {
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(key), _mm512_set1_epi32(0x7fffffff));
  return _mm512_cmpge_epu32_mask(bits, _mm512_set1_epi32((int)least));
}
inline __m512 without(__mmask16 is, __m512 a) { return _mm512_maskz_mov_ps((__mmask16)~is, a); }
inline uint64_t bits_of(__mmask16 is) { return is; }

constexpr int TURNS = 2;
constexpr Words ORDER = {0, 4, 1, 5, 2, 6, 3, 7};  // what unpacking puts in order
inline Words product32(Words a, uint64_t by) {
  return (Words)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64((int64_t)by));
}
inline Words low_pairs(Words a, Words b) { return (Words)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
inline Words high_pairs(Words a, Words b) { return (Words)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }

Integers brains(Floats x);
inline void put_wide(float *to, __m512 x) { _mm512_stream_ps(to, x); }
inline void put_wide(Half *to, __m512 x) {
  const __m256i halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_stream_si256(reinterpret_cast<__m256i *>(to), halves);
}
inline void put_wide(Brain *to, __m512 x) {
  _mm256_stream_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtepi32_epi16((__m512i)brains(x)));
}

}  // namespace

#include "vectors.h"

namespace {

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
    __m512i bits = _mm512_and_si512(_mm512_castps_si512(load_wide(squares + 16 * v)), magnitude);
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
