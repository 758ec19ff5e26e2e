/* AVX2 with F16C and BMI: 8 elements at a time. */
#include "passes.h"

#if defined(__AVX2__) && defined(__F16C__) && defined(__BMI__)

#include <immintrin.h>

#include "float_formats.h"

namespace {

typedef __m256 Floats;
typedef int32_t Integers __attribute__((vector_size(32)));
typedef uint32_t Unsigned __attribute__((vector_size(32)));
typedef uint64_t Words __attribute__((vector_size(32)));

inline __m256 load_wide(const float *from) { return _mm256_loadu_ps(from); }
inline __m256 load_wide(const Half *from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
inline __m256 load_wide(const Brain *from) {
  __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* Magnitudes are below 2**31: a signed comparison orders them, also with least - 1 = -1. */
inline __m256 reaching(__m256 key, uint32_t least) {
  const __m256i bits = _mm256_and_si256(_mm256_castps_si256(key), _mm256_set1_epi32(0x7fffffff));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(bits, _mm256_set1_epi32((int)least - 1)));
}
inline __m256 without(__m256 is, __m256 a) { return _mm256_andnot_ps(is, a); }
inline uint64_t bits_of(__m256 is) { return (uint32_t)_mm256_movemask_ps(is); }

constexpr int TURNS = 1;
constexpr Words ORDER = {0, 2, 1, 3};  // what unpacking puts in order
inline Words product32(Words a, uint64_t by) {
  return (Words)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x((int64_t)by));
}
inline Words low_pairs(Words a, Words b) { return (Words)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
inline Words high_pairs(Words a, Words b) { return (Words)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }

Integers brains(Floats x);
inline void put_wide(float *to, __m256 x) { _mm256_stream_ps(to, x); }
inline void put_wide(Half *to, __m256 x) {
  const __m128i halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_stream_si128(reinterpret_cast<__m128i *>(to), halves);
}
inline void put_wide(Brain *to, __m256 x) {
  const auto bits = (__m256i)brains(x);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
  _mm_stream_si128(reinterpret_cast<__m128i *>(to), _mm256_castsi256_si128(packed));
}

}  // namespace

#include "vectors.h"

namespace {

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
