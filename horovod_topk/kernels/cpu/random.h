/* Random numbers from Philox4x32-10, as in horovod_topk/ops/philox.py: 16 bits each, eight per block.
 * Everything is local to the file that includes it. */
#ifndef TOPKEF_RANDOM_H
#define TOPKEF_RANDOM_H

#include <stdint.h>
#include <string.h>

#include "passes.h"

namespace {

constexpr uint32_t MULTIPLIERS[] = {0xD2511F53u, 0xCD9E8D57u}, KEY_STEPS[] = {0x9E3779B9u, 0xBB67AE85u};
constexpr int ROUNDS = 10;

/* The four words of one block. */
inline void philox_block(uint32_t block, const topkef::Key &key, uint32_t *words) {
  uint32_t a = block, b = 0, c = (uint32_t)key.committed, d = (uint32_t)((uint64_t)key.committed >> 32);
  uint32_t left = key.words[0], right = key.words[1];
  for (int round = 0; round < ROUNDS; ++round, left += KEY_STEPS[0], right += KEY_STEPS[1]) {
    const uint64_t one = (uint64_t)a * MULTIPLIERS[0], other = (uint64_t)c * MULTIPLIERS[1];
    a = (uint32_t)(other >> 32) ^ b ^ left;
    c = (uint32_t)(one >> 32) ^ d ^ right;
    b = (uint32_t)other;
    d = (uint32_t)one;
  }
  const uint32_t found[] = {a, b, c, d};
  memcpy(words, found, sizeof found);
}

#ifndef TOPKEF_PHILOX
constexpr int64_t PHILOX = 1;  // blocks computed at once

inline void philox(uint32_t block, const topkef::Key &key, uint32_t *words) {
  philox_block(block, key, words);
}
#endif

constexpr int64_t DRAWN = 8 * (PHILOX + 1);  // most numbers that are drawn in excess

/* Draw numbers `first` to `first + count` of a tensor into `room`; returns a pointer to the first. */
inline const uint16_t *draw(const topkef::Format &format, int64_t first, int64_t count, uint16_t *room) {
  if (!format.draws) return room;
  const int64_t from = first / 8, to = (first + count + 7) / 8;
  for (int64_t block = from; block < to; block += PHILOX) {
    uint32_t words[4 * PHILOX];
    philox((uint32_t)block, format.key, words);
    memcpy(room + 8 * (block - from), words, sizeof words);  // the lower half of a word first
  }
  return room + first % 8;
}

/* `topkef::Random`. */
inline void random_words(const topkef::Key &key, uint32_t from, int64_t count, uint32_t *words) {
  uint32_t found[4 * PHILOX];
  for (int64_t i = 0; i < count; i += PHILOX) {
    philox(from + (uint32_t)i, key, found);
    const int64_t some = count - i < PHILOX ? count - i : PHILOX;
    memcpy(words + 4 * i, found, (size_t)(16 * some));
  }
}

}  // namespace

#endif
