/* Packs numbers of 1 to 8 bits without gaps, the lowest bit of the first in bit 0 of the first byte.
 * Everything is local to the file that includes it. */
#ifndef TOPKEF_BITS_H
#define TOPKEF_BITS_H

#include <stdint.h>
#include <string.h>

#include <type_traits>

namespace {

/* Pack the lower bits of eight bytes: bytes are joined to pairs, pairs to fours. */
template <int bits>
inline uint64_t joined_bits(uint64_t bytes) {
  constexpr uint64_t low = (1u << bits) - 1, pair = (1u << 2 * bits) - 1;
  constexpr uint64_t four = ((uint64_t)1 << 4 * bits) - 1;
  bytes = (bytes & low * 0x0001000100010001u) | (bytes >> (8 - bits) & (low << bits) * 0x0001000100010001u);
  bytes = (bytes & pair * 0x0000000100000001u) | (bytes >> (16 - 2 * bits) & (pair << 2 * bits) * 0x0000000100000001u);
  return (bytes & four) | (bytes >> (32 - 4 * bits) & four << 4 * bits);
}

/* Unpack them. */
template <int bits>
inline uint64_t parted_bits(uint64_t word) {
  constexpr uint64_t low = (1u << bits) - 1, pair = (1u << 2 * bits) - 1;
  constexpr uint64_t four = ((uint64_t)1 << 4 * bits) - 1;
  word = (word & four) | (word & four << 4 * bits) << (32 - 4 * bits);
  word = (word & pair * 0x0000000100000001u) | (word & (pair << 2 * bits) * 0x0000000100000001u) << (16 - 2 * bits);
  return (word & low * 0x0001000100010001u) | (word & (low << bits) * 0x0001000100010001u) << (8 - bits);
}

/* Pack or unpack groups of eight numbers, `bits` bytes each. */
template <int bits>
inline void pack_eights(const uint8_t *codes, int64_t eights, uint8_t *to) {
  for (int64_t i = 0; i < eights; ++i) {
    uint64_t bytes;
    memcpy(&bytes, codes + 8 * i, 8);
    bytes = joined_bits<bits>(bytes);
    memcpy(to + bits * i, &bytes, bits);
  }
}

template <int bits>
inline void unpack_eights(const uint8_t *from, int64_t eights, uint8_t *codes) {
  int64_t i = 0;
  for (; bits * i + 8 <= bits * eights; ++i) {  // one load, of more bytes than these
    uint64_t word;
    memcpy(&word, from + bits * i, 8);
    word = parted_bits<bits>(word);
    memcpy(codes + 8 * i, &word, 8);
  }
  for (; i < eights; ++i) {
    uint64_t word = 0;
    memcpy(&word, from + bits * i, bits);
    word = parted_bits<bits>(word);
    memcpy(codes + 8 * i, &word, 8);
  }
}

/* The same for 4 bits, in a form that compilers make faster. */
template <>
inline void pack_eights<4>(const uint8_t *codes, int64_t eights, uint8_t *to) {
  for (int64_t i = 0; i < 4 * eights; ++i) {
    uint16_t pair;
    memcpy(&pair, codes + 2 * i, 2);
    to[i] = (uint8_t)(pair | pair >> 4);
  }
}

template <>
inline void unpack_eights<4>(const uint8_t *from, int64_t eights, uint8_t *codes) {
  for (int64_t i = 0; i < 4 * eights; ++i) {
    codes[2 * i] = from[i] & 15;
    codes[2 * i + 1] = from[i] >> 4;
  }
}

template <>
inline void pack_eights<8>(const uint8_t *codes, int64_t eights, uint8_t *to) {
  memcpy(to, codes, (size_t)(8 * eights));
}

template <>
inline void unpack_eights<8>(const uint8_t *from, int64_t eights, uint8_t *codes) {
  memcpy(codes, from, (size_t)(8 * eights));
}

/* Calls `each` with a number of bits as a constant. */
template <int most = 8, class Each>
inline void for_bits(int64_t bits, Each each) {
  if constexpr (most > 1)
    if (bits < most) return for_bits<most - 1>(bits, each);
  each(std::integral_constant<int, most>{});
}

inline void put_bits(uint8_t *to, int64_t bit, int64_t bits, uint32_t code) {
  for (int64_t i = bit; i < bit + bits; ++i, code >>= 1)
    to[i / 8] = (uint8_t)((to[i / 8] & ~(1u << i % 8)) | (code & 1u) << i % 8);
}

inline uint32_t get_bits(const uint8_t *from, int64_t bit, int64_t bits) {
  uint32_t code = 0;
  for (int64_t i = 0; i < bits; ++i) code |= (uint32_t)(from[(bit + i) / 8] >> (bit + i) % 8 & 1) << i;
  return code;
}

/* How many of `count` numbers, the first of which is number `at`, are before a byte boundary. */
inline int64_t before_byte(int64_t at, int64_t count) {
  const int64_t head = -at & 7;
  return head < count ? head : count;
}

/* Write `count` numbers below 2^bits, the first of which is number `at`. The bits after the last number
 * in its byte become 0. */
inline void pack_bits(const uint8_t *codes, int64_t at, int64_t count, int64_t bits, uint8_t *to) {
  const int64_t head = before_byte(at, count), eights = (count - head) / 8;
  for (int64_t i = 0; i < head; ++i) put_bits(to, (at + i) * bits, bits, codes[i]);
  uint8_t *whole = to + (at + head) * bits / 8;
  for_bits(bits, [&](auto known) { pack_eights<known>(codes + head, eights, whole); });
  for (int64_t i = head + 8 * eights; i < count; ++i) put_bits(to, (at + i) * bits, bits, codes[i]);
  const int64_t end = (at + count) * bits;
  if (end % 8) to[end / 8] &= (uint8_t)((1u << end % 8) - 1);
}

inline void unpack_bits(const uint8_t *from, int64_t at, int64_t count, int64_t bits, uint8_t *codes) {
  const int64_t head = before_byte(at, count), eights = (count - head) / 8;
  for (int64_t i = 0; i < head; ++i) codes[i] = (uint8_t)get_bits(from, (at + i) * bits, bits);
  const uint8_t *whole = from + (at + head) * bits / 8;
  for_bits(bits, [&](auto known) { unpack_eights<known>(whole, eights, codes + head); });
  for (int64_t i = head + 8 * eights; i < count; ++i)
    codes[i] = (uint8_t)get_bits(from, (at + i) * bits, bits);
}

/* Whether a number has all bits set; numbers begin at a byte boundary. */
inline bool has_largest(const uint8_t *from, int64_t total, int64_t bits) {
  constexpr int64_t SOME = 1024;
  uint8_t codes[SOME];
  const auto largest = (uint8_t)((1u << bits) - 1);
  uint8_t most = 0;
  for (int64_t at = 0; at < total; at += SOME) {
    const int64_t count = total - at < SOME ? total - at : SOME;
    unpack_bits(from, at, count, bits, codes);
    for (int64_t i = 0; i < count; ++i) most = codes[i] > most ? codes[i] : most;
  }
  return most == largest;
}

#ifndef TOPKEF_SIGNS
/* A bit for each value, in groups of eight: set if it is below 0. */
inline void signs_of(const float *values, int64_t eights, uint8_t *to) {
  for (int64_t i = 0; i < eights; ++i) {
    uint32_t byte = 0;
    for (int b = 0; b < 8; ++b) byte |= (uint32_t)(values[8 * i + b] < 0) << b;
    to[i] = (uint8_t)byte;
  }
}

/* Write `minus` where a bit is set, else `plus`. */
inline void choose_by(const uint8_t *from, int64_t eights, float plus, float minus, float *to) {
  for (int64_t i = 0; i < 8 * eights; ++i) to[i] = from[i / 8] >> i % 8 & 1 ? minus : plus;
}
#endif

/* Write a bit for each of `count` values, the first of which is number `at`: set if it is below 0. */
inline void pack_signs(const float *values, int64_t at, int64_t count, uint8_t *to) {
  const int64_t head = before_byte(at, count), eights = (count - head) / 8, end = at + count;
  for (int64_t i = 0; i < head; ++i) put_bits(to, at + i, 1, values[i] < 0);
  signs_of(values + head, eights, to + (at + head) / 8);
  for (int64_t i = head + 8 * eights; i < count; ++i) put_bits(to, at + i, 1, values[i] < 0);
  if (end % 8) to[end / 8] &= (uint8_t)((1u << end % 8) - 1);
}

/* Read the values of bits from number `at` on. */
inline void unpack_signs(const uint8_t *from, int64_t at, int64_t count, float plus, float minus,
                         float *to) {
  const int64_t head = before_byte(at, count), eights = (count - head) / 8;
  for (int64_t i = 0; i < head; ++i) to[i] = get_bits(from, at + i, 1) ? minus : plus;
  choose_by(from + (at + head) / 8, eights, plus, minus, to + head);
  for (int64_t i = head + 8 * eights; i < count; ++i) to[i] = get_bits(from, at + i, 1) ? minus : plus;
}

}  // namespace

#endif
