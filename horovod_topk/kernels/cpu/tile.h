/* Tiles of a few elements before they are added: in place, or scaled and corrected on the stack. Tiles
 * are small so that all memory streams advance together: hardware prefetching stops for idle streams.
 * Everything is local to the file that includes it, which first defines how cache lines are stored
 * (`stream`). */
#ifndef TOPKEF_TILE_H
#define TOPKEF_TILE_H

#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "float_formats.h"
#include "passes.h"
#include "topk/weights.h"

namespace {

constexpr int64_t TILE = 64;  // elements of a tile

/* Elements before `out` reaches a cache line, at most n. */
template <class R>
inline int64_t unaligned(const R *out, int64_t n) {
  int64_t bytes = (int64_t)(-(uintptr_t)out & 63u);
  int64_t head = bytes % (int64_t)sizeof(R) ? 0 : bytes / (int64_t)sizeof(R);
  return head < n ? head : n;
}

#ifndef TOPKEF_LANES
template <class R>
inline int64_t stream(const R *, R *, int64_t) {
  return 0;
}
template <class R>
inline int64_t stream_difference(const R *, const float *, R *, int64_t) {
  return 0;
}
#endif

/* Weights of a tile, where an instruction set has its own way; returns how many were computed. */
template <class R>
inline int64_t weigh_lanes(const R *, typename Real<R>::Bits, R *) {
  return 0;
}

/* to[0..n) = from[0..n), with non-temporal stores from the first cache line on. */
template <class R>
inline void put_past_caches(const R *from, R *to, int64_t n) {
  const int64_t done = stream(from, to, n);
  if (done < n) memcpy(to + done, from + done, (size_t)(n - done) * sizeof(R));
}

/* out = m u + g, each product and sum rounded; `out` overlaps nothing else, and is aligned. */
template <class R>
inline void accelerate(const R *u, R m, const R *g, R *__restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = m * load(u, i) + load(g, i);
}

/* Residuals and gradients, scaled and corrected before they are added; see `topkef::Source`. */
template <class R, class G>
class Tile {
 public:
  const R *e = nullptr;  // the first loaded elements, ready to be added
  const G *g = nullptr;
  const R *w = nullptr;  // their weights; null: all are 1

  Tile(const topkef::Source &source, topkef::ShardLayout layout) : source_(source), layout_(layout) {}

  /* Load TILE elements or fewer, of one block if there are several shards; stores new velocities. */
  inline void take(int64_t at, int64_t count) {
    const int64_t natural = layout_.natural(at);
    e = static_cast<const R *>(source_.residual) + at;
    g = static_cast<const G *>(source_.gradient) + natural;
    if (source_.scale != 1) scale(count);
    if constexpr (std::is_same_v<R, G>)
      if (source_.velocity) correct(natural, count);
    if (source_.squares) weigh(natural, count);
  }

 private:
  inline void scale(int64_t count) {
    const auto factor = (R)source_.scale;
    for (int64_t i = 0; i < count; ++i) scaled_[i] = factor * load(e, i);
    e = scaled_;
  }

  inline void correct(int64_t natural, int64_t count) {
    const auto m = (R)source_.momentum;
    accelerate(static_cast<const R *>(source_.velocity) + natural, m, g, velocity_, count);
    if (source_.following)
      put_past_caches(velocity_, static_cast<R *>(source_.following) + natural, count);
    if (source_.nesterov) accelerate(velocity_, m, g, ahead_, count);
    g = source_.nesterov ? ahead_ : velocity_;
  }

  inline void weigh(int64_t natural, int64_t count) {
    auto squares = static_cast<const R *>(source_.squares) + natural;
    const auto least = (typename Real<R>::Bits)source_.least_square;
    int64_t i = count == TILE ? weigh_lanes(squares, least, weights_) : 0;
    for (; i < count; ++i) weights_[i] = weight_of(load(squares, i), least);
    w = weights_;
  }

  const topkef::Source &source_;
  const topkef::ShardLayout layout_;
  alignas(64) R scaled_[TILE];
  alignas(64) R velocity_[TILE];
  alignas(64) R ahead_[TILE];
  alignas(64) R weights_[TILE];
};

}  // namespace

#endif
