/* Values that are plus or minus one of their block's scales: INT2 and INT3. The rules are those of
 * `horovod_topk.ops.protocol.Ops.pack_values`. Everything is local to the file that includes it. */
#ifndef TOPKEF_MAGNITUDES_H
#define TOPKEF_MAGNITUDES_H

#include <stdint.h>

#include "baselines/bits.h"
#include "codes.h"
#include "float_formats.h"
#include "passes.h"

namespace {

/* Reads value i of `count`. A value has `bits` bits: the number of its region, and a sign. */
template <class R, int kind, int bits>
struct Magnitude {
  static constexpr int64_t BLOCKED = 1024, REGIONS = 1 << (bits - 1);
  const uint8_t *scales, *body;

  Magnitude(const uint8_t *data, int64_t count) : scales(data), body(data + scale_bytes(kind, count)) {}
  R at(int64_t i) const {
    const int64_t bit = i * bits, shift = bit & 7;
    uint32_t code = (uint32_t)body[bit >> 3] >> shift;
    if (8 % bits && shift + bits > 8) code |= (uint32_t)body[(bit >> 3) + 1] << (8 - shift);
    const float scale = scale_at(scales, i / BLOCKED * REGIONS + (code & (REGIONS - 1)));
    const uint32_t minus = code >> (bits - 1) << 31;
    return (R)bit_cast<float>(bit_cast<uint32_t>(scale) ^ minus);
  }
};

/* The number of some magnitudes, and the sum of their parts. */
struct Counted {
  int32_t count, total;

  Counted operator-(Counted other) const { return {count - other.count, total - other.total}; }
  int32_t mean() const { return count ? total / count : 0; }
};

/* The regions of a block's magnitudes: region r has what is above limits[r - 1] and at most limits[r]. */
template <int bits>
class Regions {
 public:
  static constexpr int MOST = 1 << (bits - 1), ROUNDS = 2;
  int32_t limits[MOST] = {};
  Counted parts[MOST];

  /* `values` are whole numbers of parts, of which 1024 times the largest does not overflow. */
  Regions(const int32_t *values, int64_t count) : values_(values), count_(count) {
    parts[0] = {(int32_t)count, 0};
    for (int64_t i = 0; i < count; ++i) parts[0].total += values[i];
    const Counted whole = parts[0];
    grow<1>(whole);
  }

  int32_t of(int32_t value) const {
    int32_t region = 0;
    for (int r = 0; r < MOST - 1; ++r) region += value > limits[r];
    return region;
  }

 private:
  template <int regions>
  void grow(Counted whole) {
    if constexpr (regions < MOST) {
      int32_t halved[MOST];
      for (int r = 0; r < regions; ++r) {
        halved[2 * r] = mean(r);
        halved[2 * r + 1] = limits[r];
      }
      for (int r = 0; r < 2 * regions - 1; ++r) limits[r] = halved[r];
      count<2 * regions>(whole);
      for (int round = 0; round < ROUNDS; ++round) {
        int32_t means[2 * regions];
        for (int r = 0; r < 2 * regions; ++r) means[r] = mean(r);
        for (int r = 0; r < 2 * regions - 1; ++r) limits[r] = (means[r] + means[r + 1]) / 2;
        count<2 * regions>(whole);
      }
      grow<2 * regions>(whole);
    }
  }

  /* Rounded down; of an empty region its lower limit. */
  int32_t mean(int r) const { return parts[r].count ? parts[r].mean() : r ? limits[r - 1] : 0; }

  template <int regions>
  void count(Counted whole) {
    Counted above[regions + 1] = {whole};
    for (int r = 1; r < regions; ++r) {
      const int32_t limit = limits[r - 1];
      int32_t many = 0, total = 0;
      for (int64_t i = 0; i < count_; ++i) {
        const int32_t exceeds = -(int32_t)(values_[i] > limit);
        many -= exceeds;
        total += values_[i] & exceeds;
      }
      above[r] = {many, total};
    }
    for (int r = 0; r < regions; ++r) parts[r] = above[r] - above[r + 1];
  }

  const int32_t *const values_;
  const int64_t count_;
};

template <class R, int kind, int bits>
bool pack_magnitudes(const void *from, Span span, uint8_t *data, void *left, const topkef::Format &) {
  using Reader = Magnitude<R, kind, bits>;
  auto values = static_cast<const R *>(from);
  auto scales = reinterpret_cast<Brain *>(data);
  uint8_t *body = data + scale_bytes(kind, span.total);
  const bool finite = all_finite(values, span.count);
  for (int64_t at = 0; at < span.count; at += Reader::BLOCKED) {
    const int64_t count = span.count - at < Reader::BLOCKED ? span.count - at : Reader::BLOCKED;
    const int64_t first = span.first + at;
    alignas(64) float block[Reader::BLOCKED];
    alignas(64) int32_t magnitudes[Reader::BLOCKED];
    alignas(64) uint8_t codes[Reader::BLOCKED];
    for (int64_t i = 0; i < count; ++i) block[i] = limited(values[at + i]);
    const float unit = widen(scale_above(largest_of(block, count)));
    // As in `units_of`: a quotient is a whole number of parts, or at least 2^-24 from one.
    const double inverse = unit > 0 ? SCALED_UNITS / (double)unit * (1 + 0x1p-40) : 0;
    for (int64_t i = 0; i < count; ++i)
      magnitudes[i] = (int32_t)((double)bit_cast<float>(magnitude_bits(block[i])) * inverse);
    const Regions<bits> regions(magnitudes, count);
    float read[Reader::REGIONS];
    for (int r = 0; r < Reader::REGIONS; ++r) {
      const Counted part = regions.parts[r];
      const double mean = (double)part.total / ((double)SCALED_UNITS * (double)(part.count ? part.count : 1));
      const Brain scale = narrow_brain((float)((double)unit * mean));
      store(scales, first / Reader::BLOCKED * Reader::REGIONS + r, scale);
      read[r] = widen(scale);
    }
    for (int64_t i = 0; i < count; ++i)
      codes[i] = (uint8_t)(regions.of(magnitudes[i]) | (int32_t)(block[i] < 0) << (bits - 1));
    pack_bits(codes, first, count, bits, body);
    for (int64_t i = 0; i < count; ++i) {
      const float scale = read[codes[i] & (Reader::REGIONS - 1)];
      store(static_cast<R *>(left), at + i, values[at + i] - (R)(block[i] < 0 ? -scale : scale));
    }
  }
  return finite;
}

}  // namespace

#endif
