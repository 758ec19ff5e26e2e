/* Encodes and decodes tensors by a coder, block by block. Everything is local to the file that includes it. */
#ifndef TOPKEF_BLOCKS_H
#define TOPKEF_BLOCKS_H

#include <stdint.h>

#include "baselines/coders.h"
#include "tile.h"

namespace {

constexpr int64_t WRITTEN = 2 * TILE;  // elements that are written at once

using topkef::KEPT;
using topkef::Pairs;
using topkef::ShardLayout;
using topkef::Source;

/* Values as a coder takes them: finite, within `LIMIT`, and float32. */
struct Coded {
  const float *values;
  float largest;          // magnitude
  bool were_finite;       // whether the original values are
  bool are_as_they_were;  // whether no value was converted
};

template <class R>
inline const float *limited(const R *values, int64_t count, float *room) {
  for (int64_t i = 0; i < count; ++i) room[i] = limited(values[i]);
  return room;
}

/* Whether a coder takes values of this largest magnitude, as bits, as they are. */
template <class R>
inline bool is_coded(typename Real<R>::Bits largest) {
  return sizeof(R) == sizeof(float) && largest <= bit_cast<uint32_t>(LIMIT);
}

/* Convert values for a coder: in place if they need no change, else into `room`. */
template <class R>
inline Coded as_coded(const R *values, int64_t count, float *room) {
  const typename Real<R>::Bits largest = largest_bits(values, count);
  if constexpr (sizeof(R) == sizeof(float))
    if (is_coded<R>(largest)) return {values, bit_cast<float>(largest), true, true};
  limited(values, count, room);
  return {room, largest_of(room, count), largest < Real<R>::infinity, false};
}

/* left = values - read, with non-temporal stores if `format` asks for them; `left` may be `values`. */
template <class R>
INLINE void leave(const R *values, const float *read, int64_t count, R *left, const Format &format) {
  if (!format.keeps) {
    for (int64_t i = 0; i < count; ++i) store(left, i, values[i] - values[i]);  // NaN stays
    return;
  }
  const int64_t done = format.past_caches ? stream_difference(values, read, left, count) : 0;
  for (int64_t i = done; i < count; ++i) store(left, i, values[i] - (R)read[i]);
}

/* `topkef::Measure` of a coder. */
template <class R, class Coder>
bool measure_tile(const void *from, int64_t count, const Format &format, Measured *found) {
  alignas(64) float room[CODED];
  const Coded coded = as_coded(static_cast<const R *>(from), count, room);
  *found = Coder::measure(coded.values, count, coded.largest, format);
  found->are_coded = coded.are_as_they_were;
  return coded.were_finite;
}

/* Measure a block, in tiles if it is long. Returns whether all values are finite. */
template <class R, class Coder>
bool measure_block(const R *values, int64_t count, const Format &format, Measured *found) {
  if (count <= Coder::TILED) return measure_tile<R, Coder>(values, count, format, found);
  Pairs pairs;
  bool finite = true;
  for (int64_t i = 0; i < count; i += FOLDED) {
    const int64_t some = count - i < FOLDED ? count - i : FOLDED;
    finite &= measure_tile<R, Coder>(values + i, some, format, found);
    pairs.add(*found);
  }
  *found = pairs.all();
  return finite;
}

/* Write the codes of at most `most` values of one block. `are_coded`: whether they need no conversion. */
template <int64_t most, class R, class Coder>
INLINE void write_some(Coder *coder, typename Coder::Scale scale, const R *values, bool are_coded, int64_t at,
                       int64_t count, R *left, const Format &format) {
  alignas(64) float room[most], read[most];
  alignas(64) uint16_t drawn[most + DRAWN];
  const float *coded;
  if constexpr (sizeof(R) == sizeof(float))
    coded = are_coded ? values : limited(values, count, room);
  else
    coded = limited(values, count, room);
  coder->write(coded, at, count, scale, left ? read : nullptr, draw(format, at, count, drawn));
  if (left) leave(values, read, count, left, format);
}

/* `topkef::WriteTile` of a coder. */
template <class R, class Coder>
void write_tile(const void *from, Span span, const Measured &found, uint8_t *data, void *left,
                const Format &format) {
  Coder coder(data, span.total, format);
  const auto scale = coder.put_scale(span.first / coder.block, found);
  auto values = static_cast<const R *>(from);
  write_some<CODED>(&coder, scale, values, is_coded<R>(largest_bits(values, span.count)), span.first,
                    span.count, static_cast<R *>(left), format);
}

/* `topkef::Pack` of a coder: whole blocks. */
template <class R, class Coder>
bool pack_blocks(const void *from, Span span, uint8_t *data, void *left, const Format &format) {
  auto values = static_cast<const R *>(from);
  Coder coder(data, span.total, format);
  bool finite = true;
  for (int64_t i = 0; i < span.count; i += coder.block) {
    const int64_t count = span.count - i < coder.block ? span.count - i : coder.block;
    Measured found;
    finite &= measure_block<R, Coder>(values + i, count, format, &found);
    write_tile<R, Coder>(values + i, {span.first + i, count, span.total}, found, data,
                         static_cast<R *>(left) + i, format);
  }
  return finite;
}

/* Adds residuals and gradients of one block after another, tile by tile. */
template <class R, class G>
class Adding {
 public:
  Adding(const Source &source, ShardLayout layout, Span span, int64_t block)
      : tile_(source, layout), is_shard_(layout.parts > 1), ahead_(block >= FORGOTTEN ? FORGOTTEN : 0),
        block_(block), residual_(static_cast<const R *>(source.residual)), at_(span.first),
        end_(span.first + span.count) {}

  /* Begin a block. Returns where its sums go: to `memory`, where they have the residual's position within a
   * cache line. */
  const R *start(R *memory) {
    to_ = at_ + block_ < end_ ? at_ + block_ : end_;
    out_ = memory + (LINE - unaligned(residual_ + at_, LINE)) % LINE;
    return out_;
  }

  /* Add the next tile, if there is one. */
  INLINE void next() {
    const int64_t head = unaligned(residual_ + at_, to_ - at_);
    if (!head && to_ - at_ >= TILE && !is_shard_)
      add(TILE);
    else if (at_ < to_)
      add_few(head);
  }

  /* The same, if its sums go before `limit`. */
  INLINE void next_before(const R *limit) {
    if (out_ + TILE <= limit) next();
  }

  void rest() {
    while (at_ < to_) next();
  }

 private:
  static constexpr int64_t LINE = 64 / sizeof(R);
  /* While a block of this length is measured, hardware prefetching stops: instructions do it then. */
  static constexpr int64_t FORGOTTEN = 2048;

  INLINE void add(int64_t count) {
    tile_.take(at_, count);
    for (int64_t i = 0; ahead_ && i < count; i += LINE) {
      __builtin_prefetch(tile_.e + ahead_ + i, 0, 2);
      __builtin_prefetch(tile_.g + ahead_ + i, 0, 2);
    }
    for (int64_t i = 0; i < count; ++i) out_[i] = load(tile_.e, i) + (R)widen(load(tile_.g, i));
    at_ += count;
    out_ += count;
  }

  /* Add up to a cache line, or to the end. Tiles of shards do not cross multiples of TILE. */
  void add_few(int64_t head) {
    const int64_t whole = is_shard_ ? TILE - at_ % TILE : head ? head : TILE;
    add(to_ - at_ < whole ? to_ - at_ : whole);
  }

  Tile<R, G> tile_;
  const bool is_shard_;
  const int64_t ahead_;  // distance of prefetches; 0: none
  const int64_t block_;
  const R *const residual_;
  int64_t at_;
  const int64_t end_;
  int64_t to_ = 0;
  R *out_ = nullptr;
};

/* `topkef::EncodeBlocks` of a coder. Tiles that are written make room for sums of the next block, so that
 * memory is read and written at the same time. */
template <class R, class G, class Coder>
bool encode_blocks(const Source &source, ShardLayout layout, Span span, uint8_t *data, const Format &format,
                   void *memory) {
  Coder coder(data, span.total, format);
  auto left = static_cast<R *>(source.candidate);
  Adding<R, G> adding(source, layout, span, coder.block);
  const R *block = adding.start(static_cast<R *>(memory));
  adding.rest();
  bool finite = true;
  for (int64_t at = span.first, end = at + span.count; at < end; at += coder.block) {
    const int64_t count = end - at < coder.block ? end - at : coder.block;
    Measured found;
    finite &= measure_block<R, Coder>(block, count, format, &found);
    const auto scale = coder.put_scale(at / coder.block, found);
    const R *next = adding.start(static_cast<R *>(memory));
    auto write = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      write_some<WRITTEN>(&coder, scale, block + i, found.are_coded, at + i, n, left + at + i, format);
    };
    int64_t i = unaligned(left + at, count);
    if (i) write(0, i);
    for (; i + WRITTEN <= count; i += WRITTEN) {
      write(i, WRITTEN);
      for (int64_t tile = 0; tile < WRITTEN; tile += TILE) adding.next_before(block + i + WRITTEN);
    }
    if (i < count) write(i, count - i);
    adding.rest();
    block = next;
  }
  return finite;
}

/* `topkef::Scatter` of a coder: all elements, in order. */
template <class R, class Coder>
void add_blocks(void *sum, int64_t base, int64_t count, const topkef::Rows *rows) {
  auto total = static_cast<R *>(sum);
  alignas(64) float read[CODED];
  for (int64_t rank = 0; rank < rows->ranks; ++rank) {
    auto data = const_cast<uint8_t *>(rows->values + rank * rows->values_stride);
    const Coder coder(data, rows->entries, rows->format);
    for (int64_t at = 0; at < count; at += CODED) {
      const int64_t some = count - at < CODED ? count - at : CODED;
      coder.read(base + at, some, read);
      for (int64_t i = 0; i < some; ++i) total[at + i] += (R)read[i];
    }
  }
}

template <int kind>
bool has_sound_scales(const uint8_t *data, int64_t total, const Format &) {
  return are_scales(data, scales_of(kind, total));
}

template <class Coder>
bool is_sound(const uint8_t *data, int64_t total, const Format &format) {
  return Coder(const_cast<uint8_t *>(data), total, format).is_sound(total);
}

}  // namespace

#endif
