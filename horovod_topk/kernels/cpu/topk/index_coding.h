/* Encodes and decodes indices: plain, or packed (Elias 1974, Fano 1971; the format is in
 * horovod_topk/methods/topk.py). Everything is local to the file that includes it. */
#ifndef TOPKEF_INDEX_CODING_H
#define TOPKEF_INDEX_CODING_H

#include <stdint.h>
#include <string.h>

#include "float_formats.h"
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

inline void put_bit(uint8_t *map, int64_t bit) { map[bit >> 3] |= (uint8_t)(1u << (bit & 7)); }

/* Eight numbers at a time; compilers use the vectors of the instruction set. */
typedef uint32_t Eight32 __attribute__((vector_size(32)));
typedef uint64_t Eight64 __attribute__((vector_size(64)));
typedef uint64_t Four64 __attribute__((vector_size(32)));
typedef uint64_t Two64 __attribute__((vector_size(16)));

/* The first four of eight numbers in one word, and the last four in another. */
struct Folded {
  uint64_t half[2];

  explicit Folded(const Eight64 &eight) {
    Four64 four[2];
    Two64 two[2];
    memcpy(four, &eight, sizeof four);
    for (int h = 0; h < 2; ++h) {
      memcpy(two, &four[h], sizeof two);
      two[0] |= two[1];
      half[h] = two[0][0] | two[0][1];
    }
  }
};

constexpr int64_t EIGHTS_LOW = 14;  // most bits of a number: four and half a byte fit a word

/* Sets ascending bits of a zeroed bitmap. The last word is kept in a register. */
class BitWriter {
 public:
  BitWriter(uint8_t *map, int64_t bytes) : map_(map), bytes_(bytes) {}

  /* Whether eight bits from `first` on can be written at once. */
  bool fits(uint64_t first) const { return (int64_t)(first >> 3) + 8 <= bytes_; }

  void write(const Eight64 &bit) {
    const uint64_t base = bit[0] & ~(uint64_t)7;
    flush();
    if (bit[7] - base < 64) {
      const Folded folded((Eight64{} + 1) << (bit - base));
      word_ = (base - base_ < 64 ? word_ >> (base - base_) : 0) | folded.half[0] | folded.half[1];
      base_ = base;
    } else {
      for (int j = 0; j < 8; ++j) put_bit(map_, (int64_t)bit[j]);
      base_ = bit[7] & ~(uint64_t)7;
      if (fits(base_)) memcpy(&word_, map_ + base_ / 8, sizeof word_);
    }
  }

  void flush() const {
    if (fits(base_)) memcpy(map_ + base_ / 8, &word_, sizeof word_);
  }

 private:
  uint8_t *const map_;
  const int64_t bytes_;
  uint64_t word_ = 0, base_ = 0;  // the bits of eight bytes, and the number of the first bit
};

/* Pack groups of eight indices, as long as whole words may be written; returns how many. */
inline int64_t pack_eights(const uint32_t *index, int64_t k, const Packing &size, uint8_t *data) {
  const Eight64 each = {0, 1, 2, 3, 4, 5, 6, 7};
  const auto low = (uint64_t)size.low, mask = ((uint64_t)1 << low) - 1;
  BitWriter map(data + size.low_bytes, size.map_bytes);
  int64_t i = 0, at = 0;
  for (; low <= EIGHTS_LOW && i + 8 <= k && at + 16 <= size.low_bytes; i += 8, at += size.low) {
    Eight32 narrow;
    memcpy(&narrow, index + i, sizeof narrow);
    const Eight64 place = each + (uint64_t)i, x = __builtin_convertvector(narrow, Eight64) - place;
    const Eight64 bit = (x >> low) + place;
    if (!map.fits(bit[0])) break;
    map.write(bit);
    Folded folded((x & mask) << (each & 3) * low);
    auto all = (unsigned __int128)folded.half[1] << 4 * low | folded.half[0];
    memcpy(data + at, &all, sizeof all);
  }
  map.flush();
  return i;
}

/* Pack the lower bits of entries from `first` on, a multiple of eight. */
inline void pack_low(const uint32_t *index, int64_t first, int64_t k, const Packing &size,
                     uint8_t *to) {
  const uint64_t mask = ((uint64_t)1 << size.low) - 1;
  uint64_t word = 0;
  int64_t bits = 0, at = first / 8 * size.low;
  for (int64_t i = first; i < k; ++i) {
    word |= (((uint64_t)index[i] - (uint64_t)i) & mask) << bits;
    bits += size.low;
    for (; bits >= 8; bits -= 8, word >>= 8) to[at++] = (uint8_t)word;
  }
  if (bits > 0) to[at] = (uint8_t)word;
}

inline void pack_packed(const uint32_t *index, int64_t k, int64_t n, uint8_t *data) {
  Packing size(n, k);
  uint8_t *map = data + size.low_bytes;
  memset(map, 0, (size_t)size.map_bytes);
  int64_t first = pack_eights(index, k, size, data);
  pack_low(index, first, k, size, data);
  for (int64_t i = first; i < k; ++i)
    put_bit(map, (int64_t)(((uint64_t)index[i] - (uint64_t)i) >> size.low) + i);
}

template <class I>
inline void pack_plain(const uint32_t *index, int64_t k, int64_t, uint8_t *data) {
  for (int64_t i = 0; i < k; ++i) store(reinterpret_cast<I *>(data), i, (I)index[i]);
}

/* Write the positions of a word's set bits, plus `base`; up to 64 numbers may be written. */
#ifndef TOPKEF_POSITIONS
inline void positions(uint64_t word, uint32_t base, uint32_t *to) {
  for (; word; word &= word - 1) *to++ = base + (uint32_t)__builtin_ctzll(word);
}
#endif

/* Finds the set bits of a bitmap, word after word. */
class BitReader {
 public:
  BitReader(const uint8_t *map, const Packing &size) : map_(map), size_(size) {}

  bool is_at_end() const { return at_ >= size_.map_bytes; }

  /* Write the positions of the next word's set bits; 64 numbers may be written. Returns their number. */
  int64_t next(uint32_t *to) {
    uint64_t word = word_at(map_, at_, size_.map_bytes);
    const int64_t rest = size_.map_bits - 8 * at_;
    if (rest < 64) word &= ((uint64_t)1 << rest) - 1;
    positions(word, (uint32_t)(8 * at_), to);
    at_ += 8;
    return __builtin_popcountll(word);
  }

 private:
  const uint8_t *const map_;
  const Packing &size_;
  int64_t at_ = 0;
};

/* Decode indices [first, first + count), given their positions in the bitmap; `first` is a multiple of
 * eight. Returns whether they are below 2**32. */
inline bool join_low(const uint8_t *data, const Packing &size, int64_t first, int64_t count,
                     const uint32_t *place, uint32_t *to) {
  const Eight64 each = {0, 1, 2, 3, 4, 5, 6, 7};
  const auto low = (uint64_t)size.low, mask = ((uint64_t)1 << low) - 1;
  const int64_t half = size.low / 2, odd = size.low % 2 * 4;  // bytes and bits of four numbers
  int64_t i = 0, at = first / 8 * size.low;
  Eight64 above = {};
  const int64_t last = low <= EIGHTS_LOW ? size.bytes() - half - 8 : -1;
  for (; i + 8 <= count && at <= last; i += 8, at += size.low) {
    Eight32 narrow;
    memcpy(&narrow, place + i, sizeof narrow);
    const uint64_t a = load(reinterpret_cast<const uint64_t *>(data + at));
    const uint64_t b = load(reinterpret_cast<const uint64_t *>(data + at + half)) >> odd;
    const Eight64 bits = (Eight64{a, a, a, a, b, b, b, b} >> (each & 3) * low) & mask;
    const Eight64 entry = each + (uint64_t)(first + i);
    const Eight64 high = __builtin_convertvector(narrow, Eight64) - entry;
    const Eight64 index = (high << low | bits) + entry;
    above |= index;
    narrow = __builtin_convertvector(index, Eight32);
    memcpy(to + i, &narrow, sizeof narrow);
  }
  const Folded folded(above);
  uint64_t all = folded.half[0] | folded.half[1];
  for (; i < count; ++i) {
    const int64_t entry = first + i, bit = entry * size.low;
    uint64_t word = word_at(data, bit >> 3, size.bytes()) >> (bit & 7) & mask;
    uint64_t high = place[i] - (uint32_t)entry, index = (high << low | word) + (uint64_t)entry;
    all |= index;
    to[i] = (uint32_t)index;
  }
  return all >> 32 == 0;
}

inline bool ascends(const uint32_t *index, int64_t from, int64_t to) {
  uint32_t wrong = 0;
  for (int64_t i = from > 0 ? from : 1; i < to; ++i) wrong |= (uint32_t)(index[i - 1] >= index[i]);
  return !wrong;
}

/* Decode packed indices. Returns whether there are k that ascend below n; `to` has room for k. */
inline bool unpack_packed(const uint8_t *data, int64_t k, int64_t n, uint32_t *to) {
  constexpr int64_t PART = 1024;
  uint32_t place[PART + 128];
  Packing size(n, k);
  BitReader map(data + size.low_bytes, size);
  bool sound = true;
  int64_t held = 0;
  for (int64_t done = 0; done < k;) {
    while (held < PART && !map.is_at_end()) held += map.next(place + held);
    const int64_t count = held < PART ? held : PART;
    if (count == 0 || done + count > k) return false;
    sound &= join_low(data, size, done, count, place, to + done);
    sound &= ascends(to, done, done + count);
    held -= count;
    memcpy(place, place + count, (size_t)held * sizeof *place);
    done += count;
  }
  while (!map.is_at_end()) held += map.next(place);
  return sound && held == 0 && (int64_t)to[k - 1] < n;
}

/* The same for plain indices, which are only checked if `to` is null. */
template <class I>
inline bool unpack_plain(const uint8_t *data, int64_t k, int64_t n, uint32_t *to) {
  auto index = reinterpret_cast<const I *>(data);
  uint32_t wrong = k > 0 && (int64_t)load(index, k - 1) >= n;
  for (int64_t i = 1; i < k; ++i) wrong |= (uint32_t)(load(index, i - 1) >= load(index, i));
  for (int64_t i = 0; to && i < k; ++i) to[i] = (uint32_t)load(index, i);
  return !wrong;
}

}  // namespace

#endif
