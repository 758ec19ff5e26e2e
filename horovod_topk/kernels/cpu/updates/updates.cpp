/* The C interface: updates of optimizers, and what they are told of gradients. */
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "passes.h"
#include "topkef.h"
#include "workers.h"

using namespace topkef;

namespace {

/* Calls `pass` with each block of a sample, and adds up the LANES sums of both classes: a number a tensor for each
 * class. `places` has six numbers a tensor, as in `topkef_lost`. */
template <class Pass>
void in_samples(const int64_t *places, int64_t count, int threads, int classes, double *out, Pass pass) {
  parallel(count, threads, [&](int64_t i) {
    const int64_t *place = places + 6 * i, numel = place[2];
    double sums[2 * LANES] = {};
    for (int64_t block = 0;; block += place[5]) {
      const int64_t whole = (place[4] + block * place[3]) * SHARD_BLOCK;
      if (whole >= numel) break;
      pass(i, place, whole, block * SHARD_BLOCK, std::min(SHARD_BLOCK, numel - whole), sums);
    }
    for (int of = 0; of < classes; ++of)
      out[of * count + i] = std::accumulate(sums + of * LANES, sums + (of + 1) * LANES, 0.0);
  });
}

/* Copies what an update writes, of `n` elements from number `at` on. */
void copy_state(const topkef_update &from, const topkef_update &to, int64_t at, int64_t n, int width) {
  void *const before[] = {from.weight, from.momentum, from.square, from.largest};
  void *const after[] = {to.weight, to.momentum, to.square, to.largest};
  for (int i = 0; i < 4; ++i)
    if (after[i]) std::memcpy(element(after[i], at, width), element(before[i], at, width), (size_t)(n * width));
  std::memcpy(to.arrivals + at, from.arrivals + at, (size_t)n);
}

}  // namespace

void topkef_update_velocity(const void *velocity, double factor, const void *gradient, void *out,
                            int64_t count, int width, int threads) {
  const Passes *passes = passes_of(width);
  in_chunks(count, threads, [&](int64_t at, int64_t n) {
    passes->update_velocity(element(velocity, at, width), factor, element(gradient, at, width),
                            element(out, at, width), n, count >= CACHED);
    passes->fence();
  });
}

void topkef_lost(const void *const *gradients, const void *before, const double *scales, const void *after,
                 const uint8_t *arrivals, const int64_t *places, int64_t count, int width, int threads,
                 double *out) {
  const Passes *passes = passes_of(width);
  in_samples(places, count, threads, 2, out,
             [&](int64_t i, const int64_t *place, int64_t whole, int64_t own, int64_t n, double *sums) {
               const int64_t kept = place[0] + own;
               passes->lose(element(gradients[i], whole, width), element(before, kept, width),
                            scales ? scales[i] : 1.0, element(after, kept, width),
                            arrivals + place[1] + whole, n, sums);
             });
}

void topkef_energies(const void *const *arrays, const uint8_t *arrivals, const int64_t *places, int64_t count,
                     int width, int threads, double *out) {
  const Passes *passes = passes_of(width);
  in_samples(places, count, threads, arrivals ? 2 : 1, out,
             [&](int64_t i, const int64_t *place, int64_t whole, int64_t, int64_t n, double *sums) {
               passes->square(element(arrays[i], whole, width),
                              arrivals ? arrivals + place[1] + whole : nullptr, n, sums);
             });
}

void topkef_update_all(const topkef_update *updates, const topkef_update *from, int64_t count, int width,
                       int threads) {
  const Passes *passes = passes_of(width);
  std::vector<std::pair<int64_t, int64_t>> chunks;  // a tensor, and its first element
  for (int64_t i = 0; i < count; ++i)
    for (int64_t at = 0; at < updates[i].count; at += CHUNK) chunks.emplace_back(i, at);
  parallel((int64_t)chunks.size(), threads, [&](int64_t i) {
    const auto [of, at] = chunks[(size_t)i];
    const topkef_update &each = updates[of];
    const Update update = each.square ? passes->update_adam : passes->update_sgd;
    const int64_t n = std::min<int64_t>(CHUNK, each.count - at);
    if (from) copy_state(from[of], each, at, n, width);  // to the cache
    update(each, at, n);
  });
}
