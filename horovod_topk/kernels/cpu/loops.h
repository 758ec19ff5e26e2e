/* The passes themselves, once for all instruction sets. A file that includes this one says before
 * how 64 elements are done (`lanes`), how a sum leaves (`Lines`), and what `fence` is. */
#ifndef TOPKEF_LOOPS_H
#define TOPKEF_LOOPS_H

#include <stdint.h>
#include <string.h>

#include "choose.h"
#include "number.h"
#include "passes.h"

namespace {

using topkef::BLOCK;
using topkef::List;
using topkef::Rows;
using topkef::STREAMS;
using topkef::Stretch;

/* Up to 64 elements, one by one; bit i of the result: element i is a candidate. */
template <class R, class G, class V>
inline uint64_t lanes_slowly(const R *e, const G *g, R *out, typename Real<R>::Bits least,
                             int count) {
  uint64_t found = 0;
  for (int i = 0; i < count; ++i) {
    R a = load(e, i) + (R)widen(load(g, i));
    bool is = magnitude_bits(a) >= least;
    found |= (uint64_t)is << i;
    store(out, i, is ? Sent<V, R>::left(a) : a);
  }
  return found;
}

#ifndef TOPKEF_LANES
template <class R, class G, class V>
inline uint64_t lanes(const R *e, const G *g, R *out, typename Real<R>::Bits least) {
  return lanes_slowly<R, G, V>(e, g, out, least, 64);
}
inline void fence() {}
#endif

inline int trailing_zeros(uint64_t bits) {
#ifdef __BMI__
  return (int)__builtin_ia32_tzcnt_u64(bits);
#else
  return bits ? __builtin_ctzll(bits) : 64;
#endif
}

/* Elements before `out` reaches a cache line, at most n. */
template <class R>
inline int64_t unaligned(const R *out, int64_t n) {
  int64_t bytes = (int64_t)(-(uintptr_t)out & 63u);
  int64_t head = bytes % (int64_t)sizeof(R) ? 0 : bytes / (int64_t)sizeof(R);
  return head < n ? head : n;
}

/* Entries of a list that are being written. */
template <class R>
struct End {
  uint32_t *index;
  R *value;
  int64_t size;

  explicit End(const List &list)
      : index(list.index), value(static_cast<R *>(list.value)), size(list.size) {}

  template <class G>
  void write(int64_t at, const R *e, const G *g, int64_t element) {
    index[at] = (uint32_t)element;
    value[at] = load(e, element) + (R)widen(load(g, element));
  }
};

/* Append the elements of set bits, `at` being the first. Two are written at once, whether or not
 * they are there: whether there are any is what no processor could foresee. */
template <class R, class G>
inline void append(uint64_t found, int64_t at, const R *e, const G *g, End<R> *end) {
  int count = __builtin_popcountll(found);
  int64_t size = end->size;
  for (int i = 0; i < 2; ++i, found &= found - 1)
    end->write(size + i, e, g, at + (trailing_zeros(found) & 63));
  for (int i = 2; i < count; ++i, found &= found - 1)
    end->write(size + i, e, g, at + trailing_zeros(found));
  end->size = size + count;
}

/* One element after the other where lanes do not fit: before a cache line, or at the end. */
template <class R, class G, class V>
inline void gather_few(const R *e, const G *g, R *out, Stretch *stretch, int64_t count) {
  End<R> end(stretch->list);
  for (int64_t i = 0; i < count; ++i, ++stretch->at) {
    int64_t at = stretch->at;
    bool is = lanes_slowly<R, G, V>(e + at, g + at, out + at,
                                    (typename Real<R>::Bits)stretch->least, 1);
    if (is) end.write(end.size++, e, g, at);
  }
  stretch->list.size = end.size;
}

/* `groups` times 64 elements of `streams` stretches, in turn. */
template <class R, class G, class V, int streams>
inline void gather_groups(const R *e, const G *g, R *out, Stretch *stretches, int64_t groups) {
  for (int64_t group = 0; group < groups; ++group)
    for (int s = 0; s < streams; ++s) {
      Stretch &stretch = stretches[s];
      End<R> end(stretch.list);
      int64_t at = stretch.at;
      uint64_t found = lanes<R, G, V>(e + at, g + at, out + at,
                                      (typename Real<R>::Bits)stretch.least);
      append(found, at, e, g, &end);
      stretch.list.size = end.size;
      stretch.at = at + 64;
    }
}

inline bool can_go_on(const Stretch &stretch) {
  return stretch.at < stretch.to && stretch.list.capacity - stretch.list.size >= BLOCK;
}

/* The next block of one stretch, or what comes before a cache line, or what is left. */
template <class R, class G, class V>
inline void gather_next(const R *e, const G *g, R *out, Stretch *stretch) {
  int64_t left = stretch->to - stretch->at, head = unaligned(out + stretch->at, left);
  if (head || left < 64)
    gather_few<R, G, V>(e, g, out, stretch, head ? head : left);
  else
    gather_groups<R, G, V, 1>(e, g, out, stretch, (left < BLOCK ? left : BLOCK) / 64);
}

/* Whether all streams can take another block, from cache lines on. */
template <class R>
inline bool go_together(const R *out, const Stretch *stretches, int64_t count) {
  bool all = count == STREAMS;
  for (int64_t s = 0; s < count && all; ++s) {
    int64_t at = stretches[s].at, left = stretches[s].to - at;
    all = can_go_on(stretches[s]) && left >= BLOCK && !unaligned(out + at, left);
  }
  return all;
}

template <class R, class G, class V>
void gather(const void *residual, const void *gradient, void *candidate, Stretch *stretches,
            int64_t count) {
  auto e = static_cast<const R *>(residual);
  auto g = static_cast<const G *>(gradient);
  auto out = static_cast<R *>(candidate);
  for (int64_t s = 0; s < count; ++s)
    if (can_go_on(stretches[s])) gather_next<R, G, V>(e, g, out, &stretches[s]);
  while (go_together(out, stretches, count))
    gather_groups<R, G, V, STREAMS>(e, g, out, stretches, BLOCK / 64);
  for (int64_t s = 0; s < count; ++s)
    while (can_go_on(stretches[s])) gather_next<R, G, V>(e, g, out, &stretches[s]);
  fence();
}

template <class R, class G>
void sum(const void *residual, const void *gradient, int64_t at, int64_t count, void *sums) {
  auto e = static_cast<const R *>(residual) + at;
  auto g = static_cast<const G *>(gradient) + at;
  for (int64_t i = 0; i < count; ++i) static_cast<R *>(sums)[i] = load(e, i) + (R)widen(load(g, i));
}

template <class R, class G, class V>
bool whole(const void *residual, const void *gradient, void *candidate, void *values, int64_t n) {
  auto e = static_cast<const R *>(residual);
  auto g = static_cast<const G *>(gradient);
  auto out = static_cast<R *>(candidate);
  auto sent = static_cast<V *>(values);
  typename Real<R>::Bits largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    R a = load(e, i) + (R)widen(load(g, i));
    typename Real<R>::Bits bits = magnitude_bits(a);
    largest = bits > largest ? bits : largest;
    store(sent, i, Sent<V, R>::of(a));
    store(out, i, Sent<V, R>::left(a));
  }
  return largest < Real<R>::infinity;
}

template <class R, class V, class I>
void scatter(void *sum, int64_t base, int64_t count, const Rows *rows) {
  auto total = static_cast<R *>(sum);
  int64_t stop = base + count;
  for (int64_t rank = 0; rank < rows->ranks; ++rank) {
    const uint8_t *row = rows->gathered + rank * rows->stride;
    auto index = reinterpret_cast<const I *>(row + rows->index_at);
    auto value = reinterpret_cast<const V *>(row + rows->value_at);
    int64_t i = rows->read[rank];
    for (; i < rows->entries; ++i) {
      int64_t j = (int64_t)load(index, i);
      if (j >= stop) break;
      total[j - base] += (R)widen(load(value, i));
    }
    rows->read[rank] = i;
  }
}

template <class R, class V>
void add(void *sum, int64_t base, int64_t count, const Rows *rows) {
  auto total = static_cast<R *>(sum);
  for (int64_t rank = 0; rank < rows->ranks; ++rank) {
    const uint8_t *row = rows->gathered + rank * rows->stride;
    auto value = reinterpret_cast<const V *>(row + rows->value_at);
    for (int64_t i = 0; i < count; ++i) total[i] += (R)widen(load(value, base + i));
  }
}

template <class R, class G>
inline void deliver_slowly(const R *total, R scale, G *gradient, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store(gradient, i, narrow<G>(total[i] * scale));
}

#ifndef TOPKEF_LANES
template <class R, class G>
struct Lines {
  static int64_t stream(const R *, R, G *, int64_t) { return 0; }
};
#endif

template <class R, class G>
void deliver(const void *sum, double scale, void *gradient, int64_t n) {
  auto total = static_cast<const R *>(sum);
  auto to = static_cast<G *>(gradient);
  int64_t head = unaligned(to, n);
  deliver_slowly(total, (R)scale, to, head);
  int64_t done = head + Lines<R, G>::stream(total + head, (R)scale, to + head, n - head);
  deliver_slowly(total + done, (R)scale, to + done, n - done);
}

template <class I>
bool ascends(const uint8_t *bytes, int64_t count, int64_t n) {
  auto index = reinterpret_cast<const I *>(bytes);
  uint32_t wrong = count > 0 && (int64_t)load(index, count - 1) >= n;
  for (int64_t i = 1; i < count; ++i) wrong |= (uint32_t)(load(index, i - 1) >= load(index, i));
  return !wrong;
}

template <class R, class G>
constexpr void fill_row(topkef::Passes *passes, int dtype) {
  passes->gather[dtype][0] = gather<R, G, R>;
  passes->gather[dtype][1] = gather<R, G, Half>;
  passes->whole[dtype][0] = whole<R, G, R>;
  passes->whole[dtype][1] = whole<R, G, Half>;
  passes->sum[dtype] = sum<R, G>;
  passes->deliver[dtype] = deliver<R, G>;
}

template <class R>
constexpr void fill_common(topkef::Passes *passes, const char *isa) {
  passes->isa = isa;
  passes->choose = choose<R>;
  passes->drop = drop<R>;
  passes->fence = fence;
  passes->send[0][0] = send<R, R, uint16_t>;
  passes->send[0][1] = send<R, R, uint32_t>;
  passes->send[1][0] = send<R, Half, uint16_t>;
  passes->send[1][1] = send<R, Half, uint32_t>;
  passes->scatter[0][0] = scatter<R, R, uint16_t>;
  passes->scatter[0][1] = scatter<R, R, uint32_t>;
  passes->scatter[1][0] = scatter<R, Half, uint16_t>;
  passes->scatter[1][1] = scatter<R, Half, uint32_t>;
  passes->add[0] = add<R, R>;
  passes->add[1] = add<R, Half>;
  passes->ascends[0] = ascends<uint16_t>;
  passes->ascends[1] = ascends<uint32_t>;
}

inline topkef::Passes float_table(const char *isa) {
  topkef::Passes passes{};
  fill_common<float>(&passes, isa);
  fill_row<float, Half>(&passes, topkef::FLOAT16);
  fill_row<float, Brain>(&passes, topkef::BFLOAT16);
  fill_row<float, float>(&passes, topkef::FLOAT32);
  return passes;
}

}  // namespace

#endif
