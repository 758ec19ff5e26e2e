/* Products of thin factors, and Gram-Schmidt. Everything is local to the file that includes it. */
#ifndef TOPKEF_MATRICES_H
#define TOPKEF_MATRICES_H

#include <stdint.h>

#include <cmath>

#include "passes.h"

namespace {

constexpr int64_t COLUMNS = 64;      // columns of a product that are computed at once
constexpr double DEPENDENT = 1e-5;  // as in horovod_topk/ops/orthonormal.py

template <class R>
void product(const void *left, const void *right, int64_t rows, int64_t inner, int64_t n,
             int64_t width, double scale, bool subtracts, void *out) {
  auto p = static_cast<const R *>(left), q = static_cast<const R *>(right);
  auto to = static_cast<R *>(out);
  const auto factor = (R)scale;
  alignas(64) R sums[COLUMNS];
  for (int64_t row = 0; row < rows; ++row, p += inner, to += width) {
    for (int64_t at = 0; at < n; at += COLUMNS) {
      const int64_t count = n - at < COLUMNS ? n - at : COLUMNS;
      for (int64_t j = 0; j < count; ++j) sums[j] = p[0] * q[at + j];
      for (int64_t i = 1; i < inner; ++i) {
        const R *__restrict each = q + i * width + at;
        const R by = p[i];
        for (int64_t j = 0; j < count; ++j) sums[j] += by * each[j];
      }
      if (subtracts)
        for (int64_t j = 0; j < count; ++j) to[at + j] -= sums[j];
      else
        for (int64_t j = 0; j < count; ++j) to[at + j] = sums[j] * factor;
    }
  }
}

/* The sum of a[i] * b[i], in the order of `Ops.sums`; `tiles` is a power of two, enough for all. */
template <class R>
double dot(const R *a, const R *b, int64_t n, int64_t tiles) {
  if (tiles > 1) {
    const int64_t half = tiles / 2 * topkef::FOLDED;
    const double first = dot(a, b, n < half ? n : half, tiles / 2);
    return first + (n > half ? dot(a + half, b + half, n - half, tiles / 2) : 0.0);
  }
  alignas(64) double tile[topkef::FOLDED];
  int64_t size = 1;
  while (size < n) size *= 2;
  for (int64_t i = 0; i < n; ++i) tile[i] = (double)a[i] * (double)b[i];
  for (int64_t i = n; i < size; ++i) tile[i] = 0;
  while (size > 1) {
    size /= 2;
    for (int64_t i = 0; i < size; ++i) tile[i] += tile[i + size];
  }
  return tile[0];
}

template <class R>
void divide(R *row, R by, int64_t length) {
  for (int64_t i = 0; i < length; ++i) row[i] = by != 0 ? row[i] / by : 0;
}

template <class R>
void orthonormalise(void *rows, int64_t count, int64_t length) {
  int64_t tiles = 1;
  while (tiles * topkef::FOLDED < length) tiles *= 2;
  auto norm = [&](const R *row) { return (R)std::sqrt(dot(row, row, length, tiles)); };
  auto first = static_cast<R *>(rows);
  for (R *row = first; row < first + count * length; row += length) {
    R largest = 0;
    for (int64_t i = 0; i < length; ++i) {
      const R size = row[i] < 0 ? -row[i] : row[i];
      if (!(size <= largest)) largest = size;
    }
    divide(row, largest, length);  // so that squares do not underflow
    const R before = norm(row);
    for (int twice = 0; twice < 2; ++twice) {
      for (const R *other = first; other < row; other += length) {
        const R along = (R)dot(other, static_cast<const R *>(row), length, tiles);
        for (int64_t i = 0; i < length; ++i) row[i] -= other[i] * along;
      }
    }
    const R left = norm(row), is_new = left > before * (R)DEPENDENT;
    divide(row, left, length);
    for (int64_t i = 0; i < length; ++i) row[i] *= is_new;
  }
}

}  // namespace

#endif
