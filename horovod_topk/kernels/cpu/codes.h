/* Encodes and decodes values of each kind. Kinds and rules are those of
 * `horovod_topk.ops.protocol.Ops.pack_values`. Everything is local to the file that includes it. */
#ifndef TOPKEF_CODES_H
#define TOPKEF_CODES_H

#include <stdint.h>
#include <string.h>

#include "float_formats.h"
#include "passes.h"

namespace {

using topkef::Span;

constexpr float LIMIT = 0x1p127f;     // values with a scale saturate here
constexpr int SCALED_UNITS = 65536;   // for exact sums, magnitudes are multiples of largest / 65536

inline int64_t block_of(int64_t kind) {
  return kind == topkef::INT8 || kind == topkef::INT4 ? 128 : kind >= topkef::SIGN && kind < topkef::MINMAX ? 1024 : 0;
}

/* Number of scales before `count` values. */
inline int64_t scales_of(int64_t kind, int64_t count) {
  const int64_t block = block_of(kind), each = kind == topkef::INT3 ? 4 : kind == topkef::INT2 ? 2 : 1;
  return block ? each * ((count + block - 1) / block) : 0;
}

/* Their bytes. */
inline int64_t scale_bytes(int64_t kind, int64_t count) { return 2 * scales_of(kind, count); }

inline int64_t value_bytes(int64_t kind, int64_t count, int64_t residual_bytes) {
  static const int64_t bits[] = {0, 16, 16, 8, 4, 1, 2, 3};
  if (kind == topkef::FULL) return count * residual_bytes;
  return scale_bytes(kind, count) + (count * bits[kind] + 7) / 8;
}

inline float scale_at(const uint8_t *scales, int64_t block) {
  return widen(load(reinterpret_cast<const Brain *>(scales), block));
}

/* Readers return value i of the `count` values that begin at `data`. */
template <class R, class V>
struct Plain {
  const V *values;

  Plain(const uint8_t *data, int64_t) : values(reinterpret_cast<const V *>(data)) {}
  R at(int64_t i) const { return (R)widen(load(values, i)); }
};

template <class R, int kind>
struct Multiple {
  const uint8_t *scales, *body;

  Multiple(const uint8_t *data, int64_t count) : scales(data), body(data + scale_bytes(kind, count)) {}
  int whole(int64_t i) const {
    if (kind == topkef::INT8) return (int8_t)body[i];
    return (int)((body[i >> 1] >> (i & 1) * 4 & 15) ^ 8) - 8;
  }
  R at(int64_t i) const { return (R)(scale_at(scales, i >> 7) * (float)whole(i)); }
};

template <class R>
struct Sign {
  const uint8_t *scales, *body;

  Sign(const uint8_t *data, int64_t count)
      : scales(data), body(data + scale_bytes(topkef::SIGN, count)) {}
  R at(int64_t i) const {
    uint32_t minus = (uint32_t)(body[i >> 3] >> (i & 7) & 1) << 31;
    return (R)bit_cast<float>(bit_cast<uint32_t>(scale_at(scales, i >> 10)) ^ minus);
  }
};

/* Writers encode values [first, first + count) of `total`; `first` is a multiple of 1024. They write the
 * rounding errors to `left`, which may be the values' memory, and return whether all are finite. */
template <class R>
inline typename Real<R>::Bits largest_bits(const R *values, int64_t count) {
  typename Real<R>::Bits largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    typename Real<R>::Bits bits = magnitude_bits(values[i]);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

template <class R>
inline bool all_finite(const R *values, int64_t count) {
  return largest_bits(values, count) < Real<R>::infinity;
}

template <class R>
bool pack_full(const void *from, Span span, uint8_t *data, void *left, const topkef::Format &) {
  auto values = static_cast<const R *>(from);
  bool finite = all_finite(values, span.count);
  memcpy(data + span.first * (int64_t)sizeof(R), values, (size_t)span.count * sizeof(R));
  if (left) memset(left, 0, (size_t)span.count * sizeof(R));
  return finite;
}

template <class R, class V>
bool pack_short(const void *from, Span span, uint8_t *data, void *left, const topkef::Format &) {
  auto values = static_cast<const R *>(from);
  auto to = reinterpret_cast<V *>(data) + span.first;
  bool finite = all_finite(values, span.count);
  for (int64_t i = 0; i < span.count; ++i) {
    R a = values[i];
    V sent = Sent<V, R>::of(a);
    store(to, i, sent);
    store(static_cast<R *>(left), i, a - (R)widen(sent));
  }
  return finite;
}

/* Make a value finite, and limit it to `LIMIT`. */
template <class R>
inline float limited(R x) {
  R magnitude = x < 0 ? -x : x;
  if (!(magnitude_bits(x) < Real<R>::infinity)) return 0;
  return (float)(magnitude > (R)LIMIT ? (x < 0 ? -(R)LIMIT : (R)LIMIT) : x);
}

inline Brain scale_above(float least) {
  return {(uint16_t)((bit_cast<uint32_t>(least) + 0xffffu) >> 16)};
}

inline float largest_of(const float *values, int64_t count) {
  return bit_cast<float>(largest_bits(values, count));
}

/* Encode values as integer multiples of a block's scale; `left` gets the rounding errors. */
template <class R>
inline void multiples(const float *block, const R *values, int64_t count, float most, Brain bits,
                      int8_t *multiple, R *left) {
  const float scale = widen(bits), divisor = scale > 0 ? scale : 1.0f;
  volatile float opaque = 12582912.0f;  // 1.5 * 2**23; volatile, so that compilers do not cancel it
  const float magic = opaque;
  for (int64_t i = 0; i < count; ++i) {
    float near = (block[i] / divisor + magic) - magic;  // the nearest integer, ties to even
    near = near < -most ? -most : near > most ? most : near;
    multiple[i] = (int8_t)near;
    store(left, i, values[i] - (R)(scale * near));
  }
}

template <class R, int kind>
bool pack_multiples(const void *from, Span span, uint8_t *data, void *left, const topkef::Format &format) {
  constexpr int64_t BLOCKED = 128;
  constexpr float MOST = kind == topkef::INT8 ? 127.0f : 7.0f;
  const float divisor = format.is_stable ? 127.4921875f : MOST;
  auto values = static_cast<const R *>(from);
  auto rest = static_cast<R *>(left);
  auto scales = reinterpret_cast<Brain *>(data);
  uint8_t *body = data + scale_bytes(kind, span.total);
  bool finite = all_finite(values, span.count);
  for (int64_t at = 0; at < span.count; at += BLOCKED) {
    int64_t count = span.count - at < BLOCKED ? span.count - at : BLOCKED;
    float block[BLOCKED];
    int8_t multiple[BLOCKED + 1];
    for (int64_t i = 0; i < count; ++i) block[i] = limited(values[at + i]);
    Brain scale = scale_above(largest_of(block, count) / divisor);
    multiples(block, values + at, count, MOST, scale, multiple, rest + at);
    multiple[count] = 0;
    int64_t entry = span.first + at;
    store(scales, entry / BLOCKED, scale);
    if (kind == topkef::INT8) {
      memcpy(body + entry, multiple, (size_t)count);
    } else {
      for (int64_t i = 0; i < count; i += 2)
        body[(entry + i) / 2] = (uint8_t)((multiple[i] & 15) | (multiple[i + 1] & 15) << 4);
    }
  }
  return finite;
}

template <class R>
void unpack_short(const uint8_t *data, Span span, void *values) {
  const Plain<R, Brain> reader(data, span.total);
  for (int64_t i = 0; i < span.count; ++i) store(static_cast<R *>(values), i, reader.at(span.first + i));
}

template <class R, int kind>
void unpack_multiples(const uint8_t *data, Span span, void *values) {
  constexpr int64_t BLOCKED = 128;
  const Multiple<R, kind> reader(data, span.total);
  for (int64_t at = 0; at < span.count; at += BLOCKED) {
    const int64_t first = span.first + at, count = span.count - at < BLOCKED ? span.count - at : BLOCKED;
    const float scale = scale_at(reader.scales, first / BLOCKED);
    const uint8_t *body = reader.body + (kind == topkef::INT8 ? first : first / 2);
    int8_t multiple[BLOCKED];
    if (kind == topkef::INT8)
      memcpy(multiple, body, (size_t)count);
    else
      for (int64_t i = 0; i < (count + 1) / 2; ++i) {
        multiple[2 * i] = (int8_t)(((body[i] & 15) ^ 8) - 8);
        multiple[2 * i + 1] = (int8_t)((body[i] >> 4 ^ 8) - 8);
      }
    for (int64_t i = 0; i < count; ++i)
      store(static_cast<R *>(values), at + i, (R)(scale * (float)multiple[i]));
  }
}

}  // namespace

#endif
