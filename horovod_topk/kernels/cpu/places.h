/* Indices as they are sent: plain, or packed as `horovod_topk.core.payload` has it (Elias 1974,
 * Fano 1971). Local to the file that includes it. */
#ifndef TOPKEF_PLACES_H
#define TOPKEF_PLACES_H

#include <stdint.h>
#include <string.h>

#include "number.h"
#include "passes.h"

namespace {

/* The sizes of k packed indices below n. */
struct Packing {
  int64_t low, low_bytes, map_bits, map_bytes;

  Packing(int64_t n, int64_t k) : low(0) {
    for (int64_t l = 1; l < 32; ++l)
      if (k * l + ((n - k) >> l) < k * low + ((n - k) >> low)) low = l;
    low_bytes = (k * low + 7) / 8;
    map_bits = k + ((n - k) >> low);
    map_bytes = (map_bits + 7) / 8;
  }

  int64_t bytes() const { return low_bytes + map_bytes; }
};

inline int64_t index_bytes(int64_t kind, int64_t n, int64_t k) {
  return kind == topkef::PACKED ? Packing(n, k).bytes() : kind * k;
}

/* Up to eight bytes at `at` of `size`, as a little-endian word. */
inline uint64_t word_at(const uint8_t *data, int64_t at, int64_t size) {
  uint64_t word = 0;
  memcpy(&word, data + at, (size_t)(size - at < 8 ? size - at : 8));
  return word;
}

inline void put_word(uint8_t *data, int64_t at, int64_t size, uint64_t word) {
  memcpy(data + at, &word, (size_t)(size - at < 8 ? size - at : 8));
}

/* Eight at a time, which are `low` bytes, for as long as sixteen may be written; returns how many. */
inline int64_t pack_low_eights(const uint32_t *index, int64_t k, int64_t low, uint8_t *to,
                               int64_t size) {
  const uint64_t mask = ((uint64_t)1 << low) - 1;
  int64_t i = 0;
  for (int64_t at = 0; low <= 16 && i + 8 <= k && at + 16 <= size; i += 8, at += low) {
    uint64_t half[2] = {0, 0};
    for (int64_t j = 0; j < 8; ++j)
      half[j / 4] |= (((uint64_t)index[i + j] - (uint64_t)(i + j)) & mask) << j % 4 * low;
    unsigned __int128 all = (unsigned __int128)half[1] << 4 * low | half[0];
    memcpy(to + at, &all, 16);
  }
  return i;
}

inline void pack_low(const uint32_t *index, int64_t k, int64_t low, uint8_t *to, int64_t size) {
  const uint64_t mask = ((uint64_t)1 << low) - 1;
  int64_t first = pack_low_eights(index, k, low, to, size);
  uint64_t word = 0;
  int64_t bits = 0, at = first / 8 * low;
  for (int64_t i = first; i < k; ++i) {
    word |= (((uint64_t)index[i] - (uint64_t)i) & mask) << bits;
    bits += low;
    if (bits >= 32) {
      uint32_t half = (uint32_t)word;
      memcpy(to + at, &half, 4);
      at += 4;
      word >>= 32;
      bits -= 32;
    }
  }
  if (at < size) put_word(to, at, size, word);
}

inline void pack_map(const uint32_t *index, int64_t k, int64_t low, uint8_t *to, int64_t size) {
  uint64_t word = 0;
  int64_t at = 0;
  for (int64_t i = 0; i < k; ++i) {
    int64_t bit = (int64_t)(((uint64_t)index[i] - (uint64_t)i) >> low) + i;
    for (; bit >= 8 * (at + 8); at += 8) {
      put_word(to, at, size, word);
      word = 0;
    }
    word |= (uint64_t)1 << (bit - 8 * at);
  }
  for (; at < size; at += 8) {
    put_word(to, at, size, word);
    word = 0;
  }
}

inline void pack_packed(const uint32_t *index, int64_t k, int64_t n, uint8_t *data) {
  Packing size(n, k);
  pack_low(index, k, size.low, data, size.low_bytes);
  pack_map(index, k, size.low, data + size.low_bytes, size.map_bytes);
}

template <class I>
inline void pack_plain(const uint32_t *index, int64_t k, int64_t, uint8_t *data) {
  for (int64_t i = 0; i < k; ++i) store(reinterpret_cast<I *>(data), i, (I)index[i]);
}

/* Write where a word's bits are, from `base` on; up to 64 numbers may be written. */
#ifndef TOPKEF_POSITIONS
inline void positions(uint64_t word, uint32_t base, uint32_t *to) {
  for (; word; word &= word - 1) *to++ = base + (uint32_t)__builtin_ctzll(word);
}
#endif

/* Which bits of a map are set, the first `k` of them; returns how many there are, or more than k. */
inline int64_t set_bits(const uint8_t *map, const Packing &size, int64_t k, uint32_t *to) {
  int64_t found = 0;
  for (int64_t at = 0; at < size.map_bytes; at += 8) {
    uint64_t word = word_at(map, at, size.map_bytes);
    int64_t rest = size.map_bits - 8 * at;
    if (rest < 64) word &= ((uint64_t)1 << rest) - 1;
    int64_t count = __builtin_popcountll(word);
    if (found + count > k) return found + count;
    if (found + 64 <= k) {
      positions(word, (uint32_t)(8 * at), to + found);
    } else {
      uint32_t own[64];
      positions(word, (uint32_t)(8 * at), own);
      memcpy(to + found, own, (size_t)count * sizeof *own);
    }
    found += count;
  }
  return found;
}

/* Lower bits [first, first + count) of a packed tensor. */
inline void unpack_low(const uint8_t *data, const Packing &size, int64_t first, int64_t count,
                       uint32_t *to) {
  const uint64_t mask = ((uint64_t)1 << size.low) - 1;
  int64_t i = 0;
  for (; size.low <= 14 && i + 4 <= count; i += 4) {  // four and a part of a byte in one word
    int64_t bit = (first + i) * size.low, at = bit >> 3;
    if (at + 8 > size.bytes()) break;
    uint64_t word = load(reinterpret_cast<const uint64_t *>(data + at)) >> (bit & 7);
    for (int64_t j = 0; j < 4; ++j) to[i + j] = (uint32_t)(word >> j * size.low & mask);
  }
  for (; i < count; ++i) {
    int64_t bit = (first + i) * size.low;
    to[i] = (uint32_t)(word_at(data, bit >> 3, size.bytes()) >> (bit & 7) & mask);
  }
}

/* Returns whether there are k that ascend below n; `to` has room for k. */
inline bool unpack_packed(const uint8_t *data, int64_t k, int64_t n, uint32_t *to) {
  constexpr int64_t PART = 1024;
  Packing size(n, k);
  if (set_bits(data + size.low_bytes, size, k, to) != k) return false;
  uint32_t low[PART];
  uint64_t before = 0, wrong = 0;
  for (int64_t at = 0; at < k; at += PART) {
    int64_t count = k - at < PART ? k - at : PART;
    unpack_low(data, size, at, count, low);
    for (int64_t i = 0; i < count; ++i) {
      uint64_t x = (uint64_t)(to[at + i] - (uint32_t)(at + i)) << size.low | low[i];
      uint64_t index = x + (uint64_t)(at + i);
      wrong |= index >> 32;
      to[at + i] = (uint32_t)index;
    }
    wrong |= (uint64_t)(at > 0 && to[at] <= before);
    for (int64_t i = at + 1; i < at + count; ++i) wrong |= (uint64_t)(to[i - 1] >= to[i]);
    before = to[at + count - 1];
  }
  return !wrong && before < (uint64_t)n;
}

/* The same of plain ones; they are looked at where they are if `to` is null. */
template <class I>
inline bool unpack_plain(const uint8_t *data, int64_t k, int64_t n, uint32_t *to) {
  auto index = reinterpret_cast<const I *>(data);
  uint32_t wrong = k > 0 && (int64_t)load(index, k - 1) >= n;
  for (int64_t i = 1; i < k; ++i) wrong |= (uint32_t)(load(index, i - 1) >= load(index, i));
  for (int64_t i = 0; to && i < k; ++i) to[i] = (uint32_t)load(index, i);
  return !wrong;
}

/* The first `count` of k indices, which are sound. */
inline void first_indices(int64_t kind, const uint8_t *data, int64_t k, int64_t n, int64_t count,
                          int64_t *to) {
  if (kind != topkef::PACKED) {
    for (int64_t i = 0; i < count; ++i)
      to[i] = kind == 0   ? i
              : kind == 2 ? (int64_t)load(reinterpret_cast<const uint16_t *>(data), i)
                          : (int64_t)load(reinterpret_cast<const uint32_t *>(data), i);
    return;
  }
  Packing size(n, k);
  const uint8_t *map = data + size.low_bytes;
  const uint64_t mask = ((uint64_t)1 << size.low) - 1;
  for (int64_t i = 0, bit = 0; i < count && bit < size.map_bits; ++bit) {
    if (!(map[bit >> 3] >> (bit & 7) & 1)) continue;
    int64_t low = i * size.low;
    uint64_t word = word_at(data, low >> 3, size.bytes()) >> (low & 7) & mask;
    to[i] = (int64_t)((uint64_t)(bit - i) << size.low | word) + i;
    ++i;
  }
}

}  // namespace

#endif
