/* The passes over memory that a bucket is made of, as a table that each instruction set fills. */
#ifndef TOPKEF_PASSES_H
#define TOPKEF_PASSES_H

#include <stdint.h>

namespace topkef {

enum Dtype { FLOAT16 = 0, BFLOAT16 = 1, FLOAT32 = 2, FLOAT64 = 3, DTYPES = 4 };

constexpr int64_t BLOCK = 4096;  // elements gathered from between two looks at a list's room
constexpr int64_t STREAMS = 3;   // stretches gathered from at once: memory answers sooner to several
constexpr int64_t SLACK = 64;    // entries that may be written past a list's size

/* Candidates for being sent, in ascending order of index. */
struct List {
  uint32_t *index;
  void *value;    // of the residual's dtype
  void *scratch;  // as many of the same width
  int64_t size;
  int64_t capacity;  // SLACK more are allocated
};

/* A stretch of a tensor: where it is, where it ends, and what it has found. */
struct Stretch {
  int64_t at, to;
  uint64_t least;  // magnitude from which on an element is a candidate, as bits
  List list;
};

/* What tells the k best from the rest: the least magnitude among them, as bits, and how many of
 * exactly that one are. NaN is as large as infinity, of equals the lower index comes first. */
struct Cut {
  uint64_t least;
  int64_t ties;
};

/* Rows of one tensor's entries, one a rank, and how far each has been read. */
struct Rows {
  const uint8_t *gathered;
  int64_t stride;  // payload bytes
  int64_t ranks;
  int64_t value_at, index_at;
  int64_t entries;
  int64_t *read;  // one a rank
};

/* out = e + g, but where |e + g| >= least: there the entry joins the list, and out is what sending
 * it leaves. Every stretch goes on to its end, or until its list has no room for a block. */
using Gather = void (*)(const void *e, const void *g, void *out, Stretch *stretches, int64_t count);

/* sums[0..count) = e + g, from element `at` on. */
using Sum = void (*)(const void *e, const void *g, int64_t at, int64_t count, void *sums);

/* Where the k best of several lists end, 1 <= k <= their sizes. Their scratch is one stretch of
 * memory, which the first begins. */
using Choose = Cut (*)(const Stretch *stretches, int64_t count, int64_t k);

/* Drop from lists what a cut drops: it goes back into `out`. */
using Drop = void (*)(Stretch *stretches, int64_t count, Cut cut, void *out);

/* Write lists to a payload, one after the other; returns whether all of it is finite. */
using Send = bool (*)(const Stretch *stretches, int64_t count, uint8_t *values, uint8_t *indices);

/* All elements are sent: `values` as they go out, `out` what is left. Returns whether all of them
 * are finite. */
using Whole = bool (*)(const void *e, const void *g, void *out, void *values, int64_t n);

/* total[0..count) += the entries with indices in [base, base + count), rank after rank. */
using Scatter = void (*)(void *total, int64_t base, int64_t count, const Rows *rows);

/* gradient[0..n) = total * scale; other threads see it after a fence. */
using Deliver = void (*)(const void *total, double scale, void *gradient, int64_t n);

/* After it, what was streamed past the caches is seen by all. */
using Fence = void (*)();

/* Whether indices ascend strictly and lie below n. */
using Ascends = bool (*)(const uint8_t *index, int64_t count, int64_t n);

struct Passes {
  const char *isa;
  Gather gather[DTYPES][2];    // [gradient's dtype][values are halves]
  Sum sum[DTYPES];             // [gradient's dtype]
  Choose choose;
  Drop drop;
  Send send[2][2];             // [values are halves][indices: 2 bytes, 4 bytes]
  Whole whole[DTYPES][2];      // as gather
  Scatter scatter[2][2];       // [values are halves][indices: 2 bytes, 4 bytes]
  Scatter add[2];              // [values are halves]: no indices, all elements in order
  Deliver deliver[DTYPES];     // [gradient's dtype]
  Fence fence;
  Ascends ascends[2];          // [indices: 2 bytes, 4 bytes]
};

/* Residuals of 4 bytes and gradients of up to 4. */
const Passes *portable_passes();
const Passes *avx2_passes();    // nullptr where it was not compiled
const Passes *avx512_passes();  // the same

/* Residuals and gradients of 8 bytes. */
const Passes *double_passes();

}  // namespace topkef

#endif
