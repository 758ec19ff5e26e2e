/* The C interface: operations of other methods than Top-K. */
#include <algorithm>
#include <vector>

#include "passes.h"
#include "topkef.h"
#include "workers.h"

using namespace topkef;

void topkef_moments(const void *values, int64_t count, int width, int threads, double *out) {
  const Passes *passes = passes_of(width);
  static_assert(CHUNK == 512 * FOLDED, "chunks have tiles by a power of two");
  std::vector<Measured> found((size_t)((count + CHUNK - 1) / CHUNK));
  in_chunks(count, threads, [&](int64_t from, int64_t some) {
    Pairs pairs;
    for (int64_t at = from; at < from + some; at += FOLDED) {
      Measured tile;
      passes->measure[TERNARY](element(values, at, width), std::min(FOLDED, from + some - at), {}, &tile);
      pairs.add(tile);
    }
    found[(size_t)(from / CHUNK)] = pairs.all();
  });
  Pairs pairs;
  for (const Measured &each : found) pairs.add(each);
  const Measured all = pairs.all();
  out[0] = all.high;
  out[1] = all.below;
  out[2] = all.above;
}

void topkef_pack_ternary(const void *values, int64_t count, int width, float limit, float scale,
                         const int64_t *key, uint8_t *out, int threads) {
  constexpr int64_t SPAN = 640, SPANS = 512;  // whole bytes and draws; few, so that memory is read steadily
  const Passes *passes = passes_of(width);
  Format format{count, 0, false, true, false, key_of(key)};
  Measured agreed;
  agreed.low = limit;
  agreed.high = scale;
  parallel((count + SPANS * SPAN - 1) / (SPANS * SPAN), threads, [&](int64_t i) {
    const int64_t to = std::min(count, (i + 1) * SPANS * SPAN);
    for (int64_t at = i * SPANS * SPAN; at < to; at += SPAN)
      passes->write_tile[TERNARY](element(values, at, width), {at, std::min(SPAN, to - at), count}, agreed,
                                  out, nullptr, format);
  });
}

void topkef_product(const void *left, const void *right, int64_t m, int64_t k, int64_t n, double scale,
                    int subtracts, void *out, int width, int threads) {
  const Passes *passes = passes_of(width);
  const int64_t rows = std::max<int64_t>(1, CHUNK / std::max<int64_t>(1, n));
  const int64_t columns = std::max<int64_t>(64, 4096 / k / 64 * 64);  // what stays in the cache of `right`
  parallel((m + rows - 1) / rows, threads, [&](int64_t i) {
    const int64_t first = i * rows, count = std::min(rows, m - first);
    for (int64_t at = 0; at < n; at += columns)
      passes->product(element(left, first * k, width), element(right, at, width), count, k,
                      std::min(columns, n - at), n, scale, subtracts != 0, element(out, first * n + at, width));
  });
}

void topkef_orthonormal(void *rows, int64_t count, int64_t length, int width) {
  KeepDenormals keep;
  passes_of(width)->orthonormalise(rows, count, length);
}
