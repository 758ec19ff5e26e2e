/* The C interface: operations on one array, for methods whose buckets have no kernel. */
#include <algorithm>
#include <atomic>
#include <cstring>

#include "float_formats.h"
#include "passes.h"
#include "topkef.h"
#include "workers.h"

using namespace topkef;

namespace {

constexpr int64_t ASKED = 16;  // distance of prefetches, in elements

/* Calls each(array of R, array of R) for elements of `width` bytes. */
template <class Each>
void by_width(int width, const void *values, void *out, Each each) {
  if (width == 8)
    each(static_cast<const double *>(values), static_cast<double *>(out));
  else
    each(static_cast<const float *>(values), static_cast<float *>(out));
}

/* Calls each(i) for `count` elements, and prefetches of(i) some elements earlier. */
template <int to_write, class Of, class Each>
void prefetched(int64_t count, Of of, Each each) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + ASKED < count) __builtin_prefetch(of(i + ASKED), to_write);
    each(i);
  }
}

/* Fill an array with zeros, which do not stay in caches if it is large. */
void clear(uint8_t *out, int64_t bytes, int threads) {
  const Passes *passes = fastest_passes();
  static const double zeros[4096] = {};
  constexpr int64_t AT_ONCE = (int64_t)sizeof zeros;
  in_chunks(bytes, threads, [&](int64_t from, int64_t count) {
    for (int64_t at = from; at < from + count; at += AT_ONCE) {
      const int64_t n = std::min(AT_ONCE, from + count - at);
      if (bytes >= CACHED * (int64_t)sizeof(float))
        passes->stream(zeros, out + at, n / (int64_t)sizeof(float));
      else
        std::memset(out + at, 0, (size_t)n);
    }
    passes->fence();
  });
}

/* Calls each(i, word) for `count` random numbers of 32 bits. */
template <class Each>
void draw_words(const int64_t *key, int64_t count, Each each) {
  constexpr int64_t SOME = 256;  // blocks of random numbers
  const Passes *passes = fastest_passes();
  uint32_t words[4 * SOME];
  for (int64_t at = 0; at < count; at += 4 * SOME) {
    const int64_t n = std::min(4 * SOME, count - at);
    passes->random(key_of(key), (uint32_t)(at / 4), (n + 3) / 4, words);
    for (int64_t i = 0; i < n; ++i) each(at + i, words[i]);
  }
}

}  // namespace

int topkef_compensate(const void *residual, const void *gradient, void *out, int64_t count, int width,
                      int dtype, int threads) {
  const Passes *passes = passes_of(width);
  std::atomic<bool> finite{true};
  in_chunks(count, threads, [&](int64_t at, int64_t n) {
    if (!passes->compensate[dtype](element(residual, at, width), element(gradient, at, dtype_bytes(dtype)),
                                   element(out, at, width), n, count >= CACHED))
      finite = false;
    passes->fence();
  });
  return finite;
}

void topkef_take(const void *values, const int64_t *index, void *out, int64_t count, int width) {
  by_width(width, values, out, [=](auto *from, auto *to) {
    prefetched<0>(count, [=](int64_t i) { return from + index[i]; },
                  [=](int64_t i) { store(to, i, load(from, index[i])); });
  });
}

void topkef_subtract_at(void *out, const int64_t *index, const void *values, int64_t count, int width) {
  KeepDenormals keep;
  by_width(width, values, out, [=](auto *from, auto *to) {
    prefetched<1>(count, [=](int64_t i) { return to + index[i]; },
                  [=](int64_t i) { store(to, index[i], load(to, index[i]) - load(from, i)); });
  });
}

void topkef_place(const void *values, const int64_t *index, int64_t k, void *out, int64_t count, int width,
                  int threads) {
  clear(static_cast<uint8_t *>(out), count * width, threads);
  by_width(width, values, out, [=](auto *from, auto *to) {
    prefetched<1>(k, [=](int64_t i) { return to + index[i]; },
                  [=](int64_t i) { store(to, index[i], load(from, i)); });
  });
}

void topkef_random_index(const int64_t *key, int64_t numel, int64_t k, int64_t *out) {
  const int64_t least = numel / k, rest = numel % k;
  int64_t begin = 0, over = 0;  // i * numel / k, and the remainder
  draw_words(key, k, [&](int64_t i, uint32_t word) {
    over += rest;
    const int64_t more = over >= k, length = least + more;
    over -= more * k;
    out[i] = begin + ((int64_t)(word >> 1) * length >> 31);
    begin += length;
  });
}

void topkef_random_bits(const int64_t *key, int64_t count, int bits, int64_t *out) {
  draw_words(key, count, [=](int64_t i, uint32_t word) { out[i] = word >> (32 - bits); });
}

void topkef_pack_values(const void *values, int64_t count, int kind, int is_stable, uint8_t *out, int width,
                        int threads) {
  const Passes *passes = passes_of(width);
  Format format;
  format.is_stable = is_stable;
  in_chunks(count, threads, [&](int64_t from, int64_t some) {
    alignas(64) double errors[PACE];
    for (int64_t at = from, to = from + some; at < to; at += PACE)
      passes->pack[kind](element(values, at, width), {at, std::min(PACE, to - at), count}, out, errors, format);
  });
}

void topkef_unpack_values(const uint8_t *data, int64_t count, int kind, void *out, int width, int threads) {
  const Passes *passes = passes_of(width);
  in_chunks(count, threads, [&](int64_t at, int64_t n) {
    passes->unpack[kind](data, {at, n, count}, element(out, at, width));
  });
}
