/* AVX2 with F16C and BMI: 8 elements at a time. */
#include "passes.h"

#if defined(__AVX2__) && defined(__F16C__) && defined(__BMI__)

#include <immintrin.h>

#define TOPKEF_LANES
#define TOPKEF_PHILOX
#define TOPKEF_SIGNS
#include "float_formats.h"

namespace {

inline void fence() { _mm_sfence(); }

inline __m256 load8(const float *from) { return _mm256_loadu_ps(from); }
inline __m256 load8(const Half *from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
inline __m256 load8(const Brain *from) {
  __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

inline __m128i halves(__m256 a) {
  return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline bool is_aligned(const void *pointer) { return ((uintptr_t)pointer & 31u) == 0; }

template <class R, class G>
inline uint64_t lanes(const float *e, const G *g, const float *w, float *out, uint32_t least) {
  // Magnitudes are below 2**31: a signed comparison orders them, also with least - 1 = -1.
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const __m256i below = _mm256_set1_epi32((int)least - 1);
  const bool aligned = is_aligned(out);
  uint64_t found = 0;
  for (int v = 0; v < 8; ++v) {
    __m256 a = _mm256_add_ps(load8(e + 8 * v), load8(g + 8 * v));
    __m256 key = w ? _mm256_mul_ps(a, _mm256_loadu_ps(w + 8 * v)) : a;
    __m256i bits = _mm256_and_si256(_mm256_castps_si256(key), magnitude);
    __m256 is = _mm256_castsi256_ps(_mm256_cmpgt_epi32(bits, below));
    __m256 rest = _mm256_andnot_ps(is, a);
    if (aligned)
      _mm256_stream_ps(out + 8 * v, rest);
    else
      _mm256_storeu_ps(out + 8 * v, rest);
    found |= (uint64_t)(uint32_t)_mm256_movemask_ps(is) << 8 * v;
  }
  return found;
}

inline void put8(float *to, __m256 x) { _mm256_stream_ps(to, x); }
inline void put8(Half *to, __m256 x) {
  _mm_stream_si128(reinterpret_cast<__m128i *>(to), halves(x));
}
inline void put8(Brain *to, __m256 x) {
  __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
  __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_stream_si128(reinterpret_cast<__m128i *>(to), _mm256_castsi256_si128(packed));
}

/* Store whole cache lines of a gradient; returns how many elements were stored. */
template <class R, class G>
struct Lines {
  static int64_t stream(float *total, float scale, G *to, int64_t n) {
    if (!is_aligned(to)) return 0;
    const __m256 factor = _mm256_set1_ps(scale);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      put8(to + i, _mm256_mul_ps(_mm256_loadu_ps(total + i), factor));
      _mm256_storeu_ps(total + i, _mm256_setzero_ps());
    }
    return i;
  }
};

/* Copy whole cache lines with non-temporal stores; returns how many elements were copied. */
inline int64_t stream(const float *from, float *to, int64_t n) {
  if (!is_aligned(to)) return 0;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
  return i;
}

/* to = from - read in whole cache lines; returns how many elements were stored. */
inline int64_t stream_difference(const float *from, const float *read, float *to, int64_t n) {
  if (!is_aligned(to)) return 0;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_stream_ps(to + i, _mm256_sub_ps(_mm256_loadu_ps(from + i), _mm256_loadu_ps(read + i)));
  return i;
}

/* A bit for each value, in groups of eight: set if it is below 0. */
inline void signs_of(const float *values, int64_t eights, uint8_t *to) {
  for (int64_t i = 0; i < eights; ++i) {
    const __m256 is = _mm256_cmp_ps(_mm256_loadu_ps(values + 8 * i), _mm256_setzero_ps(), _CMP_LT_OQ);
    to[i] = (uint8_t)_mm256_movemask_ps(is);
  }
}

/* Write `minus` where a bit is set, else `plus`. */
inline void choose_by(const uint8_t *from, int64_t eights, float plus, float minus, float *to) {
  const __m256 above = _mm256_set1_ps(plus), below = _mm256_set1_ps(minus);
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  for (int64_t i = 0; i < eights; ++i) {
    const __m256i is = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(from[i]), each), each);
    _mm256_storeu_ps(to + 8 * i, _mm256_blendv_ps(above, below, _mm256_castsi256_ps(is)));
  }
}

constexpr int64_t PHILOX = 4;  // blocks of random numbers computed at once

/* Lanes have a word of each block in their lower half; products ignore the upper half. */
inline void philox(uint32_t block, const topkef::Key &key, uint32_t *words) {
  const __m256i order = _mm256_setr_epi64x(0, 2, 1, 3);  // what unpacking puts in order
  const __m256i one = _mm256_set1_epi64x(0xD2511F53u), other = _mm256_set1_epi64x(0xCD9E8D57u);
  const __m256i half = _mm256_set1_epi64x(0xffffffffu);
  __m256i a = _mm256_add_epi64(order, _mm256_set1_epi64x(block)), b = _mm256_setzero_si256();
  __m256i c = _mm256_set1_epi64x(key.committed), d = _mm256_srli_epi64(c, 32);
  uint32_t left = key.words[0], right = key.words[1];
  for (int round = 0; round < 10; ++round, left += 0x9E3779B9u, right += 0xBB67AE85u) {
    const __m256i p = _mm256_mul_epu32(a, one), q = _mm256_mul_epu32(c, other);
    a = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(q, 32), b), _mm256_set1_epi64x(left));
    c = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p, 32), d), _mm256_set1_epi64x(right));
    b = q;
    d = p;
  }
  const __m256i low = _mm256_or_si256(_mm256_and_si256(a, half), _mm256_slli_epi64(b, 32));
  const __m256i high = _mm256_or_si256(_mm256_and_si256(c, half), _mm256_slli_epi64(d, 32));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(words), _mm256_unpacklo_epi64(low, high));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(words + 8), _mm256_unpackhi_epi64(low, high));
}

}  // namespace

#include "loops.h"

namespace topkef {

const Passes *avx2_passes() {
  static const Passes passes = float_table("avx2");
  return &passes;
}

}  // namespace topkef

#else

namespace topkef {
const Passes *avx2_passes() { return nullptr; }
}  // namespace topkef

#endif
