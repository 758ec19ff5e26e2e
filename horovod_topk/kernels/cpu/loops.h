/* The passes, written once for all instruction sets. A file that includes this one first defines how 64
 * elements are computed (`lanes`), how sums are stored (`Lines`), and `fence`. */
#ifndef TOPKEF_LOOPS_H
#define TOPKEF_LOOPS_H

#include <stdint.h>
#include <string.h>

#include "baselines/blocks.h"
#include "baselines/matrices.h"
#include "codes.h"
#include "float_formats.h"
#include "topk/index_coding.h"
#include "topk/magnitudes.h"
#include "passes.h"
#include "topk/select_k.h"
#include "tile.h"
#include "updates/updates.h"

namespace {

using topkef::BLOCK;
using topkef::SHARD_BLOCK;
using topkef::ShardLayout;
using topkef::Source;
using topkef::List;
using topkef::Rows;
using topkef::STREAMS;
using topkef::Stretch;

/* Compute up to 64 elements one by one; bit i of the result is set if element i is a candidate. */
template <class R, class G>
inline uint64_t lanes_slowly(const R *e, const G *g, const R *w, R *out, typename Real<R>::Bits least,
                             int count) {
  uint64_t found = 0;
  for (int i = 0; i < count; ++i) {
    R a = load(e, i) + (R)widen(load(g, i));
    bool is = magnitude_bits(w ? a * w[i] : a) >= least;
    found |= (uint64_t)is << i;
    store(out, i, is ? (R)0 : a);
  }
  return found;
}

#ifndef TOPKEF_LANES
template <class R, class G>
inline uint64_t lanes(const R *e, const G *g, const R *w, R *out, typename Real<R>::Bits least) {
  return lanes_slowly<R, G>(e, g, w, out, least, 64);
}
inline void fence() {}
#endif

constexpr int64_t AHEAD = 16;  // distance of prefetches, in entries
constexpr int64_t TURN = 512;  // elements of one stretch before the next stretch continues
static_assert(BLOCK % TURN == 0 && SHARD_BLOCK % TURN == 0 && TURN % TILE == 0,
              "turns part neither blocks nor shard blocks");

inline int trailing_zeros(uint64_t bits) {
#ifdef __BMI__
  return (int)__builtin_ia32_tzcnt_u64(bits);
#else
  return bits ? __builtin_ctzll(bits) : 64;
#endif
}

/* Appends entries to a list. */
template <class R>
struct End {
  uint32_t *index;
  R *value, *key;
  int64_t size;

  explicit End(const List &list)
      : index(list.index),
        value(static_cast<R *>(list.value)),
        key(static_cast<R *>(list.key)),
        size(list.size) {}

  /* Element `i` of a tile, which is element `first + i` of the tensor. */
  template <class G>
  void write(int64_t at, const Tile<R, G> &tile, int64_t first, int64_t i) {
    const R a = load(tile.e, i) + (R)widen(load(tile.g, i));
    index[at] = (uint32_t)(first + i);
    value[at] = a;
    if (tile.w) key[at] = a * tile.w[i];
  }
};

/* Append the elements of set bits; the first of the tile is element `at` of the tensor. Two entries are
 * always written, even if there are fewer, since a branch on their number could not be predicted. */
template <class R, class G>
inline void append(uint64_t found, int64_t at, const Tile<R, G> &tile, End<R> *end) {
  int count = __builtin_popcountll(found);
  int64_t size = end->size;
  for (int i = 0; i < 2; ++i, found &= found - 1)
    end->write(size + i, tile, at, trailing_zeros(found) & 63);
  for (int i = 2; i < count; ++i, found &= found - 1)
    end->write(size + i, tile, at, trailing_zeros(found));
  end->size = size + count;
}

/* Compute elements one by one where lanes do not fit: before a cache line, or at the end. */
template <class R, class G>
inline void gather_few(Tile<R, G> *tile, R *out, Stretch *stretch, int64_t count) {
  End<R> end(stretch->list);
  for (int64_t i = 0; i < count; ++i, ++stretch->at) {
    int64_t at = stretch->at;
    tile->take(at, 1);
    bool is = lanes_slowly<R, G>(tile->e, tile->g, tile->w, out + at,
                                 (typename Real<R>::Bits)stretch->least, 1);
    if (is) end.write(end.size++, *tile, at, 0);
  }
  stretch->list.size = end.size;
}

/* Compute `count` elements of each of `streams` stretches, in turns of TURN elements: several streams use
 * memory better than one, and turns longer than a cache line let the hardware prefetch. */
template <class R, class G, int streams>
inline void gather_turns(Tile<R, G> *tile, R *out, Stretch *stretches, int64_t count) {
  for (int64_t done = 0; done < count; done += TURN)
    for (int s = 0; s < streams; ++s) {
      Stretch &stretch = stretches[s];
      End<R> end(stretch.list);
      const int64_t at = stretch.at, turn = count - done < TURN ? count - done : TURN;
      const auto least = (typename Real<R>::Bits)stretch.least;
      for (int64_t i = at; i < at + turn; i += TILE) {
        tile->take(i, TILE);
        uint64_t found = lanes<R, G>(tile->e, tile->g, tile->w, out + i, least);
        append(found, i, *tile, &end);
      }
      stretch.list.size = end.size;
      stretch.at = at + turn;
    }
}

inline bool can_go_on(const Stretch &stretch) {
  return stretch.at < stretch.to && stretch.list.capacity - stretch.list.size >= BLOCK;
}

/* Elements before the next cache line. Blocks of a shard are not cut, at any alignment. */
template <class R>
inline int64_t before_lines(const R *out, const Stretch &stretch, ShardLayout layout) {
  return layout.parts > 1 ? 0 : unaligned(out + stretch.at, stretch.to - stretch.at);
}

/* Compute the next block of one stretch, or the elements before a cache line, or the rest. */
template <class R, class G>
inline void gather_next(Tile<R, G> *tile, R *out, Stretch *stretch, ShardLayout layout) {
  int64_t left = stretch->to - stretch->at, head = before_lines(out, *stretch, layout);
  if (head || left < 64)
    gather_few<R, G>(tile, out, stretch, head ? head : left);
  else
    gather_turns<R, G, 1>(tile, out, stretch, (left < BLOCK ? left : BLOCK) / 64 * 64);
}

/* Whether all streams are at a cache line and can take another block. */
template <class R>
inline bool go_together(const R *out, const Stretch *stretches, int64_t count, ShardLayout layout) {
  bool all = count == STREAMS;
  for (int64_t s = 0; s < count && all; ++s) {
    int64_t left = stretches[s].to - stretches[s].at;
    all = can_go_on(stretches[s]) && left >= BLOCK && !before_lines(out, stretches[s], layout);
  }
  return all;
}

template <class R, class G>
void gather(const Source &source, Stretch *stretches, int64_t count, ShardLayout layout) {
  Tile<R, G> tile(source, layout);
  auto out = static_cast<R *>(source.candidate);
  for (int64_t s = 0; s < count; ++s)
    if (can_go_on(stretches[s])) gather_next<R, G>(&tile, out, &stretches[s], layout);
  while (go_together(out, stretches, count, layout))
    gather_turns<R, G, STREAMS>(&tile, out, stretches, BLOCK);
  for (int64_t s = 0; s < count; ++s)
    while (can_go_on(stretches[s])) gather_next<R, G>(&tile, out, &stretches[s], layout);
  fence();
}

/* Whether the stretch has another block, and its list has room for one. */
inline bool takes_block(const Stretch &stretch) {
  return stretch.to - stretch.at >= SHARD_BLOCK && stretch.list.capacity - stretch.list.size >= SHARD_BLOCK;
}

/* Compute the next block of one shard. `next`: memory to prefetch meanwhile. */
template <class R, class G>
inline void gather_block(const topkef::Shard &shard, int64_t parts, const R *next) {
  Stretch &stretch = *shard.stretch;
  Tile<R, G> tile(shard.source, {parts, shard.first});
  auto out = static_cast<R *>(shard.source.candidate);
  const auto least = (typename Real<R>::Bits)stretch.least;
  End<R> end(stretch.list);
  for (const int64_t stop = stretch.at + SHARD_BLOCK; stretch.at < stop; stretch.at += TILE) {
    for (int64_t i = 0; next && i < TILE; i += 64 / (int64_t)sizeof(R)) __builtin_prefetch(next + i);
    if (next) next += TILE;
    tile.take(stretch.at, TILE);
    append(lanes<R, G>(tile.e, tile.g, tile.w, out + stretch.at, least), stretch.at, tile, &end);
  }
  stretch.list.size = end.size;
}

/* A processor prefetches a few streams by itself; more streams need prefetch instructions. */
constexpr int64_t FOLLOWED = 4;

template <class R, class G>
void gather_shards(const topkef::Shard *shards, int64_t count, int64_t parts) {
  auto all_take = [&] {
    bool all = true;
    for (int64_t s = 0; s < count; ++s) all &= takes_block(*shards[s].stretch);
    return all;
  };
  while (all_take())
    for (int64_t s = 0; s < count; ++s) {
      const topkef::Shard &next = shards[s + 1 < count ? s + 1 : 0];
      auto e = static_cast<const R *>(next.source.residual) + next.stretch->at;
      gather_block<R, G>(shards[s], parts, count > FOLLOWED ? e : nullptr);
    }
  for (int64_t s = 0; s < count; ++s)
    gather<R, G>(shards[s].source, shards[s].stretch, 1, ShardLayout{parts, shards[s].first});
}

template <class R, class G>
void sum(const Source &source, int64_t at, int64_t count, void *sums, ShardLayout layout) {
  auto to = static_cast<R *>(sums);
  Tile<R, G> tile(source, layout);
  for (int64_t stop = at + count; at < stop;) {
    int64_t run = TILE - at % TILE;
    run = run < stop - at ? run : stop - at;
    tile.take(at, run);
    for (int64_t i = 0; i < run; ++i) to[i] = load(tile.e, i) + (R)widen(load(tile.g, i));
    for (int64_t i = 0; tile.w && i < run; ++i) to[i] *= tile.w[i];
    at += run;
    to += run;
  }
}

template <class R>
void spread(void *out, const uint32_t *index, const void *left, int64_t count) {
  auto to = static_cast<R *>(out);
  for (int64_t i = 0; i < count; ++i) {
    if (i + AHEAD < count) __builtin_prefetch(to + index[i + AHEAD], 1);
    store(to, index[i], static_cast<const R *>(left)[i]);
  }
}

template <class R, class Reader>
void scatter(void *sum, int64_t base, int64_t count, const Rows *rows) {
  auto total = static_cast<R *>(sum);
  int64_t stop = base + count;
  for (int64_t rank = 0; rank < rows->ranks; ++rank) {
    auto index = reinterpret_cast<const uint32_t *>(rows->indices + rank * rows->indices_stride);
    Reader values(rows->values + rank * rows->values_stride, rows->entries);
    int64_t i = rows->read[rank];
    for (; i < rows->entries; ++i) {
      int64_t j = (int64_t)load(index, i);
      if (j >= stop) break;
      total[j - base] += values.at(i);
    }
    rows->read[rank] = i;
  }
}

template <class R, class Reader>
void add(void *sum, int64_t base, int64_t count, const Rows *rows) {
  auto total = static_cast<R *>(sum);
  for (int64_t rank = 0; rank < rows->ranks; ++rank) {
    Reader values(rows->values + rank * rows->values_stride, rows->entries);
    for (int64_t i = 0; i < count; ++i) total[i] += values.at(base + i);
  }
}

template <class R, class G>
inline void deliver_slowly(R *total, R scale, G *gradient, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store(gradient, i, narrow<G>(total[i] * scale));
  memset(total, 0, (size_t)n * sizeof *total);
}

#ifndef TOPKEF_LANES
template <class R, class G>
struct Lines {
  static int64_t stream(R *, R, G *, int64_t) { return 0; }
};
#endif

template <class R, class G>
void deliver(void *sum, double scale, void *gradient, int64_t n) {
  auto total = static_cast<R *>(sum);
  auto to = static_cast<G *>(gradient);
  int64_t head = unaligned(to, n);
  deliver_slowly(total, (R)scale, to, head);
  int64_t done = head + Lines<R, G>::stream(total + head, (R)scale, to + head, n - head);
  deliver_slowly(total + done, (R)scale, to + done, n - done);
}

/* Fill `out` tile by tile, from cache lines on: fill(at, count, tile) computes elements from `at` on. */
template <class R, class Fill>
inline void put_tiles(R *out, int64_t n, bool past_caches, Fill fill) {
  alignas(64) R tile[TILE];
  for (int64_t at = 0, count = unaligned(out, n < TILE ? n : TILE); at < n; at += count) {
    if (at || !count) count = n - at < TILE ? n - at : TILE;
    fill(at, count, tile);
    if (past_caches)
      put_past_caches(tile, out + at, count);
    else
      memcpy(out + at, tile, (size_t)count * sizeof(R));
  }
}

template <class R>
void update_velocity(const void *velocity, double factor, const void *gradient, void *sum, int64_t n,
                     bool past_caches) {
  auto u = static_cast<const R *>(velocity), g = static_cast<const R *>(gradient);
  put_tiles(static_cast<R *>(sum), n, past_caches, [&](int64_t at, int64_t count, R *tile) {
    accelerate(u + at, (R)factor, g + at, tile, count);
  });
}

template <class R>
inline void add_in_lanes(const R *values, int64_t n, double *sums) {
  double own[topkef::LANES];
  memcpy(own, sums, sizeof own);
  int64_t i = 0;
  for (; i + topkef::LANES <= n; i += topkef::LANES)
    for (int64_t lane = 0; lane < topkef::LANES; ++lane) own[lane] += (double)values[i + lane];
  for (; i < n; ++i) own[i % topkef::LANES] += (double)values[i];
  memcpy(sums, own, sizeof own);
}

/* Adds energy(i) of n elements to the sums of their classes: those that arrive often, and the others. Energies are
 * computed before they are added, so that both loops become vector code. */
template <class R, class Energy>
inline void sum_by_class(const uint8_t *arrivals, int64_t n, double *sums, Energy energy) {
  constexpr int64_t SOME = 256;
  R often[SOME], rarely[SOME];
  for (int64_t at = 0; at < n; at += SOME) {
    const int64_t count = n - at < SOME ? n - at : SOME;
    for (int64_t i = 0; i < count; ++i) {
      const R each = energy(at + i);
      often[i] = (int32_t)arrivals[at + i] >= TOPKEF_OFTEN ? each : (R)0;
      rarely[i] = each - often[i];
    }
    add_in_lanes(often, count, sums);
    add_in_lanes(rarely, count, sums + topkef::LANES);
  }
}

template <class R>
void lose(const void *gradient, const void *before, double scale, const void *after, const uint8_t *arrivals,
          int64_t n, double *sums) {
  auto g = static_cast<const R *>(gradient), e = static_cast<const R *>(before);
  auto rest = static_cast<const R *>(after);
  const R factor = (R)scale;
  sum_by_class<R>(arrivals, n, sums, [=](int64_t i) {
    const R came = load(g, i), whole = came + load(e, i) * factor, left = load(rest, i);
    const R sent = whole * whole - left * left;
    return came * came - (std::abs(whole - left) * 2 > std::abs(whole) ? sent : (R)0);
  });
}

template <class R>
void square(const void *values, const uint8_t *arrivals, int64_t n, double *sums) {
  auto a = static_cast<const R *>(values);
  const auto energy = [=](int64_t i) { return load(a, i) * load(a, i); };
  if (arrivals) return sum_by_class<R>(arrivals, n, sums, energy);
  constexpr int64_t SOME = 256;
  R squares[SOME];
  for (int64_t at = 0; at < n; at += SOME) {
    const int64_t count = n - at < SOME ? n - at : SOME;
    for (int64_t i = 0; i < count; ++i) squares[i] = energy(at + i);
    add_in_lanes(squares, count, sums);
  }
}

template <class R, class G>
bool compensate(const void *residual, const void *gradient, void *sums, int64_t n, bool past_caches) {
  auto e = static_cast<const R *>(residual);
  auto g = static_cast<const G *>(gradient);
  bool finite = true;
  put_tiles(static_cast<R *>(sums), n, past_caches, [&](int64_t at, int64_t count, R *tile) {
    for (int64_t i = 0; i < count; ++i) tile[i] = load(e, at + i) + (R)widen(load(g, at + i));
    finite &= all_finite(tile, count);
  });
  return finite;
}

template <class R>
void mask(const Source &source, const uint32_t *index, int64_t count, ShardLayout layout) {
  auto to = static_cast<R *>(source.following);
  auto natural = [&](int64_t i) {
    const auto place = (int64_t)index[i];
    return layout.parts == 1 ? place : layout.natural(place);
  };
  for (int64_t i = 0; i < count; ++i) {
    if (i + AHEAD < count) __builtin_prefetch(to + natural(i + AHEAD), 1);
    store(to, natural(i), (R)0);
  }
}

template <class R, class G>
constexpr void fill_row(topkef::Passes *passes, int dtype) {
  passes->gather[dtype] = gather<R, G>;
  passes->gather_shards[dtype] = gather_shards<R, G>;
  passes->sum[dtype] = sum<R, G>;
  passes->compensate[dtype] = compensate<R, G>;
  passes->deliver[dtype] = deliver<R, G>;
  passes->encode_blocks[dtype][topkef::SIGN] = encode_blocks<R, G, Signs>;
  passes->encode_blocks[dtype][topkef::MINMAX] = encode_blocks<R, G, MinMax>;
  passes->encode_blocks[dtype][topkef::MEANS] = encode_blocks<R, G, Means>;
  passes->encode_blocks[dtype][topkef::DITHERED] = encode_blocks<R, G, Dithered<false>>;
  passes->encode_blocks[dtype][topkef::DITHERED_L2] = encode_blocks<R, G, Dithered<true>>;
  passes->encode_blocks[dtype][topkef::TERNARY] = encode_blocks<R, G, Ternary>;
}

template <class R, class Reader>
constexpr void fill_kind(topkef::Passes *passes, int kind, topkef::Pack pack) {
  passes->pack[kind] = pack;
  passes->scatter[kind] = scatter<R, Reader>;
  passes->add[kind] = add<R, Reader>;
}

template <class R>
void stream_out(const void *values, void *out, int64_t n) {
  auto from = static_cast<const R *>(values);
  auto to = static_cast<R *>(out);
  const int64_t head = unaligned(to, n);
  memcpy(to, from, (size_t)head * sizeof(R));
  put_past_caches(from + head, to + head, n - head);
}

template <class R, class Coder>
constexpr void fill_coder(topkef::Passes *passes, int kind) {
  passes->pack[kind] = pack_blocks<R, Coder>;
  passes->measure[kind] = measure_tile<R, Coder>;
  passes->write_tile[kind] = write_tile<R, Coder>;
  passes->is_sound[kind] = is_sound<Coder>;
  passes->add[kind] = add_blocks<R, Coder>;
}

template <class R>
constexpr void fill_common(topkef::Passes *passes, const char *isa) {
  passes->isa = isa;
  passes->choose = choose<R>;
  passes->drop = drop<R>;
  passes->fence = fence;
  passes->spread = spread<R>;
  passes->update_velocity = update_velocity<R>;
  passes->lose = lose<R>;
  passes->square = square<R>;
  passes->update_sgd = update_sgd<R>;
  passes->update_adam = update_adam<R>;
  passes->mask = mask<R>;
  passes->product = product<R>;
  passes->orthonormalise = orthonormalise<R>;
  passes->pack_index[topkef::PACKED] = pack_packed;
  passes->pack_index[topkef::SHORT] = pack_plain<uint16_t>;
  passes->pack_index[topkef::LONG] = pack_plain<uint32_t>;
  passes->unpack_index[topkef::PACKED] = unpack_packed;
  passes->unpack_index[topkef::SHORT] = unpack_plain<uint16_t>;
  passes->unpack_index[topkef::LONG] = unpack_plain<uint32_t>;
  fill_kind<R, Plain<R, R>>(passes, topkef::FULL, pack_full<R>);
  fill_kind<R, Plain<R, Half>>(passes, topkef::HALF, pack_short<R, Half>);
  fill_kind<R, Plain<R, Brain>>(passes, topkef::BRAIN, pack_short<R, Brain>);
  fill_kind<R, Multiple<R, topkef::INT8>>(passes, topkef::INT8, pack_multiples<R, topkef::INT8>);
  fill_kind<R, Multiple<R, topkef::INT4>>(passes, topkef::INT4, pack_multiples<R, topkef::INT4>);
  fill_kind<R, Magnitude<R, topkef::INT2, 2>>(passes, topkef::INT2, pack_magnitudes<R, topkef::INT2, 2>);
  fill_kind<R, Magnitude<R, topkef::INT3, 3>>(passes, topkef::INT3, pack_magnitudes<R, topkef::INT3, 3>);
  passes->unpack[topkef::BRAIN] = unpack_short<R>;
  passes->unpack[topkef::INT8] = unpack_multiples<R, topkef::INT8>;
  passes->unpack[topkef::INT4] = unpack_multiples<R, topkef::INT4>;
  fill_kind<R, Sign<R>>(passes, topkef::SIGN, nullptr);
  fill_coder<R, Signs>(passes, topkef::SIGN);
  fill_coder<R, MinMax>(passes, topkef::MINMAX);
  fill_coder<R, Means>(passes, topkef::MEANS);
  fill_coder<R, Dithered<false>>(passes, topkef::DITHERED);
  fill_coder<R, Dithered<true>>(passes, topkef::DITHERED_L2);
  fill_coder<R, Ternary>(passes, topkef::TERNARY);
  passes->is_sound[topkef::INT8] = has_sound_scales<topkef::INT8>;
  passes->is_sound[topkef::INT4] = has_sound_scales<topkef::INT4>;
  passes->is_sound[topkef::INT2] = has_sound_scales<topkef::INT2>;
  passes->is_sound[topkef::INT3] = has_sound_scales<topkef::INT3>;
  passes->stream = stream_out<R>;
  passes->random = random_words;
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
