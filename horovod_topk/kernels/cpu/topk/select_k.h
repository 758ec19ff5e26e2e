/* Selects the k largest magnitudes of keys among candidates; of equals those with the lower index.
 *
 * Repeated histograms narrow the range down to one magnitude: two or three rounds, of which only the
 * first reads all candidates. Everything is local to the file that includes it. */
#ifndef TOPKEF_SELECT_K_H
#define TOPKEF_SELECT_K_H

#include <string.h>

#include "float_formats.h"
#include "passes.h"

namespace {

constexpr int64_t MOST_BINS = 2048;
constexpr int64_t BATCH = 64;  // dropped entries that are written back at a time

/* Magnitude for selection: NaN is as large as infinity. */
template <class R>
inline typename Real<R>::Bits rank_bits(R x) {
  typename Real<R>::Bits bits = magnitude_bits(x);
  return bits < Real<R>::infinity ? bits : Real<R>::infinity;
}

template <class Bits>
struct Range {
  Bits low, high;
};

template <class Bits>
inline Range<Bits> range_of(const Bits *bits, int64_t size) {
  Range<Bits> range{bits[0], bits[0]};
  for (int64_t i = 1; i < size; ++i) {
    range.low = bits[i] < range.low ? bits[i] : range.low;
    range.high = bits[i] > range.high ? bits[i] : range.high;
  }
  return range;
}

/* Keep only the bin with the k-th largest; k then counts within it. */
template <class Bits>
inline int64_t narrow_down(Bits *bits, int64_t size, int64_t *k, Range<Bits> range) {
  int64_t bins = MOST_BINS;
  while (bins > 32 && bins > size / 4) bins /= 2;
  int shift = 0;
  while ((range.high - range.low) >> shift >= (Bits)bins) ++shift;
  uint32_t counts[MOST_BINS];
  memset(counts, 0, (size_t)bins * sizeof *counts);
  for (int64_t i = 0; i < size; ++i) ++counts[(bits[i] - range.low) >> shift];
  int64_t bin = (int64_t)((range.high - range.low) >> shift);
  for (; *k > counts[bin]; --bin) *k -= counts[bin];
  int64_t kept = 0;
  for (int64_t i = 0; i < size; ++i) {
    Bits each = bits[i];
    bits[kept] = each;
    kept += (int64_t)((each - range.low) >> shift) == bin;
  }
  return kept;
}

/* Most candidates are far above the least, but the k-th is near it: keep only those within an eighth of a
 * power of two, if the k-th is among them. Returns how many are kept. */
template <class R>
inline int64_t keep_near(typename Real<R>::Bits *bits, int64_t size, int64_t *k) {
  using Bits = typename Real<R>::Bits;
  Bits least = bits[0];
  for (int64_t i = 1; i < size; ++i) least = bits[i] < least ? bits[i] : least;
  const Bits limit = least + Real<R>::octave / 8;
  int64_t above = 0;
  for (int64_t i = 0; i < size; ++i) above += bits[i] >= limit;
  if (above >= *k) return size;
  *k -= above;
  int64_t kept = 0;
  for (int64_t i = 0; i < size; ++i) {
    Bits each = bits[i];
    bits[kept] = each;
    kept += each < limit;
  }
  return kept;
}

/* Copy the magnitudes of all keys to the scratch memory, from that of the first list on. */
template <class R>
inline int64_t magnitudes(const topkef::Stretch *stretches, int64_t count) {
  auto bits = static_cast<typename Real<R>::Bits *>(stretches[0].list.scratch);
  int64_t total = 0;
  for (int64_t s = 0; s < count; ++s) {
    auto key = static_cast<const R *>(stretches[s].list.key);
    int64_t size = stretches[s].list.size;
    for (int64_t i = 0; i < size; ++i) bits[total + i] = rank_bits(key[i]);
    total += size;
  }
  return total;
}

template <class R>
topkef::Cut choose(const topkef::Stretch *stretches, int64_t count, int64_t k) {
  using Bits = typename Real<R>::Bits;
  auto bits = static_cast<Bits *>(stretches[0].list.scratch);
  int64_t size = keep_near<R>(bits, magnitudes<R>(stretches, count), &k);
  while (true) {
    Range<Bits> range = range_of(bits, size);
    if (range.low == range.high) return {range.low, k};
    size = narrow_down(bits, size, &k, range);
  }
}

/* The entries that a batch drops. */
template <class R>
struct Dropped {
  uint32_t index[BATCH + 16];
  R value[BATCH + 16];
  int size = 0;
};

/* Separates entries by a cut. Dropped ones are written back a batch later, after a prefetch. */
template <class R>
struct Parting {
  const uint32_t *index;
  const R *value, *key;
  uint32_t *kept_index;  // at or before `index`, as `kept_value` is at or before `value`
  R *kept_value, *kept_key, *out;
  int64_t kept = 0, ties;
  Dropped<R> batch[2], *dropped = batch;

  Parting(const topkef::List &list, const topkef::List &to, R *put_back_to, int64_t ties_kept)
      : index(list.index),
        value(static_cast<const R *>(list.value)),
        key(static_cast<const R *>(list.key)),
        kept_index(to.index + to.size),
        kept_value(static_cast<R *>(to.value) + to.size),
        kept_key(static_cast<R *>(to.key) + to.size),
        out(put_back_to),
        ties(ties_kept) {}

  /* Without a branch, which could not be predicted. */
  void take(bool keep, int64_t i) {
    const R a = value[i], weighted = key[i];
    kept_index[kept] = dropped->index[dropped->size] = index[i];
    kept_value[kept] = dropped->value[dropped->size] = a;
    kept_key[kept] = weighted;
    kept += keep;
    dropped->size += !keep;
  }

  void put_back() {
    for (int i = 0; i < dropped->size; ++i) __builtin_prefetch(out + dropped->index[i], 1);
    dropped = &batch[dropped == batch];
    for (int i = 0; i < dropped->size; ++i) store(out, dropped->index[i], dropped->value[i]);
    dropped->size = 0;
  }
};

template <class R>
inline void part_slowly(Parting<R> *parting, int64_t from, int64_t to,
                        typename Real<R>::Bits least) {
  for (int64_t i = from; i < to; ++i) {
    auto bits = rank_bits(parting->key[i]);
    bool tie = bits == least;
    bool keep = (bits > least) | (tie & (parting->ties > 0));
    parting->ties -= tie;
    parting->take(keep, i);
  }
}

#ifndef TOPKEF_PART
template <class R>
inline int64_t part(Parting<R> *, int64_t from, int64_t, typename Real<R>::Bits) {
  return from;
}
#endif

/* Append kept entries to `to`. Returns how many ties are still to be kept. */
template <class R>
inline int64_t drop_from(const topkef::List &list, topkef::List *to, topkef::Cut cut, R *out) {
  auto least = (typename Real<R>::Bits)cut.least;
  Parting<R> parting(list, *to, out, cut.ties);
  for (int64_t at = 0; at < list.size;) {
    int64_t stop = at + BATCH < list.size ? at + BATCH : list.size;
    at = part(&parting, at, stop, least);
    part_slowly(&parting, at, stop, least);
    at = stop;
    parting.put_back();
  }
  parting.put_back();
  to->size += parting.kept;
  return parting.ties > 0 ? parting.ties : 0;
}

template <class R>
void drop(topkef::Stretch *stretches, int64_t count, topkef::Cut cut, void *out) {
  topkef::List *first = &stretches[0].list;
  for (int64_t s = 0; s < count; ++s) {
    topkef::List *list = &stretches[s].list;
    const topkef::List whole = *list;
    list->size = 0;
    cut.ties = drop_from(whole, first, cut, static_cast<R *>(out));
  }
}

}  // namespace

#endif
