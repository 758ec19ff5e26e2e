/* The passes over memory that encode and decode a bucket, as a table of each instruction set. */
#ifndef TOPKEF_PASSES_H
#define TOPKEF_PASSES_H

#include <math.h>
#include <stdint.h>

#include "topkef.h"

namespace topkef {

enum Dtype { FLOAT16 = 0, BFLOAT16 = 1, FLOAT32 = 2, FLOAT64 = 3, DTYPES = 4 };

/* Kinds of values: in the residual's dtype, as shorter floats, as multiples of a block's scale, as plus
 * or minus one of a block's scales (SIGN, INT2 and INT3), or, from MINMAX on, of a coder that sends all elements of a tensor (coders.h). */
enum Kind {
  FULL = 0,
  HALF = 1,
  BRAIN = 2,
  INT8 = 3,
  INT4 = 4,
  SIGN = 5,
  INT2 = 6,
  INT3 = 7,
  MINMAX = 8,        // ByteGrad
  MEANS = 9,         // OneBit
  DITHERED = 10,     // QSGD, by the largest magnitude of a block
  DITHERED_L2 = 11,  // QSGD, by its norm
  TERNARY = 12,      // TernGrad, unclipped and with its own scale
  KINDS = 13
};

/* Kinds of indices: none, as all elements are sent, in the bucket's kind of values or, if AS_IS, in the
 * residual's dtype; packed; or 2 or 4 bytes each. */
enum Index { NONE = 0, PACKED = 1, SHORT = 2, AS_IS = 3, LONG = 4 };

constexpr int64_t BLOCK = 4096;  // elements of a block, before which a list's room is checked
constexpr int64_t STREAMS = 2;   // stretches that are read at once, as several use memory better
constexpr int64_t SLACK = 64;    // entries that may be written past a list's size

/* The key of a tensor's random numbers in one step; see horovod_topk/ops/philox.py. */
struct Key {
  uint32_t words[2];
  int64_t committed;  // number of committed steps
};

/* A key from its three numbers in the C interface. */
inline Key key_of(const int64_t *numbers) { return {{(uint32_t)numbers[0], (uint32_t)numbers[1]}, numbers[2]}; }

/* The facts about a tensor that a coder needs. */
struct Format {
  int64_t block = 0, bits = 0;  // elements of a block, bits of a code
  bool keeps = true;   // whether `left` gets the rounding errors; else zeros
  bool draws = false;  // whether it draws random numbers
  bool past_caches = false;  // whether `left` is written with non-temporal stores
  Key key = {};
  bool is_stable = false;  // whether INT8 is `stable8` of horovod_topk/ops/coding.py
};

/* Measures of a block or a tile of it; each coder sets those that it needs. */
struct Measured {
  float low = INFINITY, high = -INFINITY;  // extremes
  double above = 0, below = 0;             // sums
  int64_t negative = 0, count = 0;         // elements
  bool are_coded = true;                   // whether a coder takes the elements as they are

  /* The measures of this tile and the next one together. */
  Measured with(const Measured &next) const {
    return {low < next.low ? low : next.low,     high > next.high ? high : next.high,
            above + next.above,                  below + next.below,
            negative + next.negative,            count + next.count,
            are_coded && next.are_coded};
  }
};

/* Adds up the measures of tiles in pairs, their sums in pairs, and so on. */
class Pairs {
 public:
  void add(Measured sum) {
    int64_t level = 0;
    for (; tiles_ >> level & 1; ++level) sum = levels_[level].with(sum);
    levels_[level] = sum;
    ++tiles_;
  }

  Measured all() const {
    Measured sum;
    for (int64_t level = 0; tiles_ >> level; ++level)
      if (tiles_ >> level & 1) sum = levels_[level].with(sum);
    return sum;
  }

 private:
  int64_t tiles_ = 0;
  Measured levels_[48];
};

constexpr int64_t CODED = 2048;  // most elements that a coder gets at once
constexpr int64_t KEPT = 1 << 14;  // elements of a block that stay in a second-level cache
constexpr int64_t FOLDED = 512;  // elements of a tile; longer blocks are summed from their tiles

/* Candidates to send, in ascending order of index. */
struct List {
  uint32_t *index;
  void *value;    // of the residual's dtype
  void *key;      // weighted values, by which entries are selected; `value` itself without weights
  void *scratch;  // as many of the same width
  int64_t size;
  int64_t capacity;  // SLACK more are allocated
};

/* A stretch of a tensor: its position, its end, and its list of candidates. */
struct Stretch {
  int64_t at, to;
  uint64_t least;  // smallest magnitude of a candidate, as bits
  List list;
};

/* Separates the k best from the rest: the smallest magnitude among them, as bits, and how many have
 * exactly that one. NaN is as large as infinity; of equals the lower index comes first. */
struct Cut {
  uint64_t least;
  int64_t ties;
};

/* Values [first, first + count) of a tensor that sends `total`. */
struct Span {
  int64_t first, count, total;
};

/* Rows of one tensor's entries, one for each rank, and how far each has been read. */
struct Rows {
  const uint8_t *values, *indices;          // those of the first rank; indices have 4 bytes
  int64_t values_stride, indices_stride;    // bytes from one rank's data to the next
  int64_t ranks;
  int64_t entries;
  int64_t *read;  // entries that were read, one number for each rank
  Format format;  // for a coder
};

/* The positions of a shard's elements in a gradient that is split into blocks of SHARD_BLOCK: the shard
 * has every `parts`-th block, from `first` on. In arenas the shard's elements are consecutive. */
constexpr int64_t SHARD_BLOCK = 512;
struct ShardLayout {
  int64_t parts, first;

  int64_t natural(int64_t i) const {
    return (i / SHARD_BLOCK * parts + first) * SHARD_BLOCK + i % SHARD_BLOCK;
  }
};

/* The memory of a tensor's elements, and their sum: a = scale * e + g, or, with velocities,
 *
 *     u' = momentum * u + g
 *     a  = scale * e + u'        with `nesterov`: scale * e + (momentum * u' + g)
 *
 * Each product and sum is rounded. Velocities have the gradient's layout and the residual's dtype. */
struct Source {
  const void *residual, *gradient;
  void *candidate;
  double scale = 1;                // of the residual
  const void *velocity = nullptr;  // u; null: none, and the next members are not read
  void *following = nullptr;       // memory for u'; null: it is not stored
  double momentum = 0;
  bool nesterov = false;
  const int64_t *key = nullptr;    // two words and the committed steps; null: no random numbers
  const void *squares = nullptr;   // Adam's mean squares, for weights (weights.h), in the gradient's layout
  uint64_t least_square = 0;       // bits; smaller squares weigh as this one
};

/* out = a, except where |a|, times its weight if there are squares, is >= least: these entries are appended
 * to the list, and out is 0. Every stretch is processed to its end, or until its list has no room for a
 * block. */
using Gather = void (*)(const Source &source, Stretch *stretches, int64_t count, ShardLayout layout);

/* A stretch of a shard, and the shard's layout. */
struct Shard {
  Source source;
  Stretch *stretch;
  int64_t first;
};

/* The same for several shards of one gradient, in one pass in the order of the gradient's blocks. Each
 * stretch is processed to its end, or until its list has no room. */
using GatherShards = void (*)(const Shard *shards, int64_t count, int64_t parts);

/* sums[0..count) = a from element `at` on, or a times its weight if there are squares. */
using Sum = void (*)(const Source &source, int64_t at, int64_t count, void *sums, ShardLayout layout);

/* The cut of the k best of several lists, 1 <= k <= their sizes. Their scratch memory is contiguous, from
 * that of the first list on. */
using Choose = Cut (*)(const Stretch *stretches, int64_t count, int64_t k);

/* Drop entries below a cut from lists, and write them back to `out`. The other entries move into the
 * first list; lists are contiguous in memory. */
using Drop = void (*)(Stretch *stretches, int64_t count, Cut cut, void *out);

/* Write a span of values to `data`, where a tensor's values begin; `left` gets the rounding errors, and
 * may be `values`. Spans begin at multiples of PACE, or for coders at a block and a multiple of 8.
 * Returns whether all are finite. */
using Pack = bool (*)(const void *values, Span span, uint8_t *data, void *left, const Format &format);
constexpr int64_t PACE = 1024;

/* Read a span of values from `data`, where a tensor's values begin; it begins at a multiple of 128. */
using Unpack = void (*)(const uint8_t *data, Span span, void *values);

/* Measure a tile of a block that is longer than FOLDED. Returns whether all are finite. */
using Measure = bool (*)(const void *values, int64_t count, const Format &format, Measured *found);

/* Add, encode and store the errors of whole blocks of at most KEPT elements, with memory for one and a cache line. */
using EncodeBlocks = bool (*)(const Source &source, ShardLayout layout, Span span, uint8_t *data,
                              const Format &format, void *memory);

/* Write a span of values within one measured block; `left` as in `Pack`, or null. */
using WriteTile = void (*)(const void *values, Span span, const Measured &found, uint8_t *data,
                           void *left, const Format &format);

/* Whether scales and codes of a tensor of `total` elements are valid. */
using IsSound = bool (*)(const uint8_t *data, int64_t total, const Format &format);

/* out[0..n) = values, with non-temporal stores from the first cache line on. */
using Stream = void (*)(const void *values, void *out, int64_t n);

/* out[index[i]] = left[i]. */
using Spread = void (*)(void *out, const uint32_t *index, const void *left, int64_t count);

/* Write k ascending indices below n. */
using PackIndex = void (*)(const uint32_t *index, int64_t k, int64_t n, uint8_t *data);

/* Read k indices; returns whether they ascend and are below n. Plain ones are only checked if `to` is
 * null. */
using UnpackIndex = bool (*)(const uint8_t *data, int64_t k, int64_t n, uint32_t *to);

/* total[0..count) += the entries with indices in [base, base + count), rank after rank. */
using Scatter = void (*)(void *total, int64_t base, int64_t count, const Rows *rows);

/* gradient[0..n) = total * scale, and total = 0; the gradient is visible to others after a fence. */
using Deliver = void (*)(void *total, double scale, void *gradient, int64_t n);

/* out[0..n) = factor * velocity + gradient, all of the residual's dtype; optionally with non-temporal
 * stores, which are visible to other threads after a fence. */
using Accelerate = void (*)(const void *velocity, double factor, const void *gradient, void *out,
                            int64_t n, bool past_caches);

constexpr int64_t LANES = 16;  // partial sums of `Lose`: element i is added to number i % LANES

/* Add up the energy that error feedback takes away: that of elements that arrive often in the first
 * LANES sums, that of the rest in the others; see `topkef_lost`. */
using Lose = void (*)(const void *gradient, const void *before, double scale, const void *after,
                      const uint8_t *arrivals, int64_t n, double *sums);

/* Add up squares in the same way; without arrivals in the first sums alone. */
using Square = void (*)(const void *values, const uint8_t *arrivals, int64_t n, double *sums);

/* Update n elements of a tensor from one on; see `topkef_update_all`. */
using Update = void (*)(const topkef_update &of, int64_t from, int64_t n);

/* out[row, at] = scale * sum of left[row, i] * right[i, at], or out -= that sum if `subtracts`: for
 * `rows` rows and n of a matrix' `width` columns; i below `inner`, added in this order, each product and
 * sum rounded. */
using Product = void (*)(const void *left, const void *right, int64_t rows, int64_t inner, int64_t n,
                         int64_t width, double scale, bool subtracts, void *out);

/* Make rows orthonormal; see `horovod_topk.ops.orthonormal`. */
using Orthonormalise = void (*)(void *rows, int64_t count, int64_t length);

/* following[natural(index[i])] = 0. */
using Mask = void (*)(const Source &source, const uint32_t *index, int64_t count, ShardLayout layout);

/* Makes non-temporal stores visible to other threads. */
using Fence = void (*)();

/* sums[0..n) = residual + gradient, optionally with non-temporal stores, which are visible to other threads
 * after a fence. Returns whether all are finite. */
using Compensate = bool (*)(const void *residual, const void *gradient, void *sums, int64_t n,
                            bool past_caches);

/* The words of blocks [from, from + count) of random numbers, four each. */
using Random = void (*)(const Key &key, uint32_t from, int64_t count, uint32_t *words);

struct Passes {
  const char *isa;
  Gather gather[DTYPES];       // [gradient's dtype]
  GatherShards gather_shards[DTYPES];  // [gradient's dtype]
  Sum sum[DTYPES];             // [gradient's dtype]
  Compensate compensate[DTYPES];  // the same
  Choose choose;
  Drop drop;
  Pack pack[KINDS];
  Unpack unpack[KINDS];        // only for BRAIN, INT8 and INT4
  EncodeBlocks encode_blocks[DTYPES][KINDS];  // [gradient's dtype], only for kinds with a coder
  Measure measure[KINDS];      // the same
  WriteTile write_tile[KINDS]; // the same
  IsSound is_sound[KINDS];     // null for kinds whose values are always valid
  Stream stream;
  Random random;
  Spread spread;
  PackIndex pack_index[LONG + 1];      // [Index]
  UnpackIndex unpack_index[LONG + 1];  // [Index]
  Scatter scatter[KINDS];
  Scatter add[KINDS];          // no indices, all elements in order
  Deliver deliver[DTYPES];     // [gradient's dtype]
  Accelerate update_velocity;
  Lose lose;
  Square square;
  Update update_sgd, update_adam;
  Mask mask;
  Product product;
  Orthonormalise orthonormalise;
  Fence fence;
};

/* Residuals of 4 bytes and gradients of up to 4. */
const Passes *portable_passes();
const Passes *avx2_passes();    // nullptr if it was not compiled
const Passes *avx512_passes();  // the same

/* Residuals and gradients of 8 bytes. */
const Passes *double_passes();

/* Those of the fastest instruction set that this processor has, and HOROVOD_TOPK_ISA allows. */
const Passes *fastest_passes();

/* Those for elements of 4 or 8 bytes. */
inline const Passes *passes_of(int64_t width) { return width == 8 ? double_passes() : fastest_passes(); }

/* The address of element `at` of an array with elements of `width` bytes. */
inline const void *element(const void *array, int64_t at, int64_t width) {
  return static_cast<const uint8_t *>(array) + at * width;
}
inline void *element(void *array, int64_t at, int64_t width) {
  return static_cast<uint8_t *>(array) + at * width;
}

inline int64_t dtype_bytes(int64_t dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

/* Elements that stay cached until they are read next. */
constexpr int64_t CACHED = 1 << 18;

}  // namespace topkef

#endif
