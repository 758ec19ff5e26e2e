/* What elements weigh when they are selected by magnitude times weight: about v^(-1/4), with Adam's mean
 * square v. Computed from the bits of v, so that all instruction sets get the same.
 *
 * Everything is local to the file that includes it. */
#ifndef TOPKEF_WEIGHTS_H
#define TOPKEF_WEIGHTS_H

#include <stdint.h>

#include "float_formats.h"
#include "passes.h"

namespace {

/* The weight of one element; those with a square below `least` weigh as `least` does. */
template <class R>
inline R weight_of(R square, typename Real<R>::Bits least) {
  auto bits = magnitude_bits(square);
  bits = bits > least ? bits : least;
  return bit_cast<R>(Real<R>::one / 4 * 5 - (bits >> 2));
}

/* Bits of the power of two between 1/256 and 1/128 of the mean of a sample: the first sixteen squares of each
 * row of `stride`. If they are all 0, those of infinity: then all elements weigh alike. */
template <class R>
inline typename Real<R>::Bits least_square(const R *squares, int64_t numel, topkef::ShardLayout layout) {
  using Bits = typename Real<R>::Bits;
  constexpr int64_t ROWS = 64, RUN = 16;
  const int64_t stride = (numel / ROWS > RUN ? numel / ROWS : RUN) | 1, rows = numel / stride;
  double sum = 0;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < RUN; ++i) sum += (double)load(squares, layout.natural(row * stride + i));
  const Bits bits = rows ? magnitude_bits((R)(sum / (double)(rows * RUN))) : 0;
  if (bits == 0) return Real<R>::infinity;
  const Bits power = bits / Real<R>::octave * Real<R>::octave, seven = 7 * Real<R>::octave;
  return power > seven ? power - seven : 0;
}

}  // namespace

#endif
