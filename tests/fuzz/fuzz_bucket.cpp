/* A fuzz target for encode and decode: any recipe, any values, any damage to a payload. What comes out
 * is read by the format's docstring, and held to the laws.
 *
 * Built by scripts/fuzz.py under AddressSanitizer and UndefinedBehaviorSanitizer. All memory has
 * exactly the size that the recipe calls for. With clang, -fsanitize=fuzzer takes
 * LLVMFuzzerTestOneInput; without it, main() draws inputs itself for as many seconds as it is told.
 */
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "topkef.h"

namespace {

#define REQUIRE(condition)                                                 \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (0)

/* Numbers out of the input, zeros when it is used up. */
class Input {
 public:
  Input(const uint8_t *data, size_t size) : data_(data), size_(size) {}

  uint64_t number(int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value = value << 8 | (size_ ? (--size_, *data_++) : 0);
    return value;
  }

  int64_t below(int64_t limit) { return (int64_t)(number(4) % (uint64_t)limit); }

 private:
  const uint8_t *data_;
  size_t size_;
};

/* Memory of exactly `bytes`, some way from where malloc aligns it. */
struct Memory {
  std::vector<uint8_t> room;
  size_t offset;

  Memory(size_t bytes, size_t by) : room(bytes + by), offset(by) {}
  uint8_t *data() { return room.data() + offset; }
};

enum Kind { FULL, HALF, BRAIN, INT8, INT4, SIGN, INT2, INT3, MINMAX, MEANS, DITHERED, DITHERED_L2, TERNARY, KINDS };
enum Index { NONE = 0, PACKED = 1, SHORT = 2, AS_IS = 3, LONG = 4 };

constexpr int64_t KEYS[3 * 4 * 3] = {1, 2, 3, 0xffffffff, 4, int64_t{1} << 33};  // of at most 12 tensors

struct Tensor {
  int64_t numel, k, index, value_at, index_at, dtype, first, block;
};

struct Job {
  int64_t residual_bytes, kind, payload_bytes, sampled, parts, keeps, bits;
  std::vector<Tensor> tensors;

  int64_t kind_of(const Tensor &t) const { return t.index == AS_IS ? FULL : kind; }

  /* Where an element of a tensor lies in its gradient, which may be dealt out to shards. */
  int64_t natural(const Tensor &t, int64_t i) const {
    return (i / 512 * parts + t.first) * 512 + i % 512;
  }

  /* Enough for every shard. */
  int64_t gradient_numel(const Tensor &t) const {
    return ((t.numel - 1) / 512 * parts + parts - 1) * 512 + (t.numel - 1) % 512 + 1;
  }

  Job next_shard() const {
    Job next = *this;
    for (Tensor &t : next.tensors) t.first = (t.first + 1) % parts;
    return next;
  }

  std::vector<int64_t> recipe() const {
    std::vector<int64_t> numbers{(int64_t)tensors.size(), residual_bytes, kind, 24, payload_bytes,
                                 sampled, parts, keeps, bits};
    for (int64_t i = 0; i < (int64_t)tensors.size(); ++i) {
      const Tensor &t = tensors[(size_t)i];
      numbers.insert(numbers.end(), {t.numel, t.k, 0, t.index, t.value_at, t.index_at, t.dtype,
                                     t.first, i, t.block});
    }
    return numbers;
  }
};

/* The format as the docstring of horovod_topk/core/plan/payload.py has it, bit by bit. */
int64_t bytes_of(int64_t bits) { return (bits + 7) / 8; }

/* Whether a value is plus or minus one of the scales of its block. */
bool has_magnitudes(int64_t kind) { return kind == SIGN || kind == INT2 || kind == INT3; }

int64_t block_of(int64_t kind) {
  return has_magnitudes(kind) ? 1024 : kind == INT8 || kind == INT4 ? 128 : 0;
}

/* Scales of a block. */
int64_t scales_of(int64_t kind) { return kind == INT3 ? 4 : kind == INT2 ? 2 : 1; }

int64_t scale_bytes(int64_t kind, int64_t k) {
  return block_of(kind) ? 2 * scales_of(kind) * ((k + block_of(kind) - 1) / block_of(kind)) : 0;
}

int64_t value_bits(const Job &job, const Tensor &t) {
  static const int64_t bits[] = {0, 16, 16, 8, 4, 1, 2, 3};
  return job.kind_of(t) == FULL ? 8 * job.residual_bytes : bits[job.kind];
}

bool has_coder(const Job &job, const Tensor &t) { return job.kind_of(t) >= MINMAX; }

int64_t blocks(const Tensor &t) { return (t.k + t.block - 1) / t.block; }

/* Bytes of a coder's scales, and bits of a code. */
int64_t coder_scale_bytes(const Job &job, const Tensor &t) {
  if (job.kind == TERNARY) return 4;
  return blocks(t) * (job.kind == MINMAX ? 8 : job.kind == MEANS ? 4 : 2);
}

int64_t code_bits(const Job &job) { return job.kind == MINMAX ? 8 : job.kind == MEANS ? 1 : job.bits; }

int64_t code_bytes(const Job &job, const Tensor &t) {
  return job.kind == TERNARY ? (t.k + 4) / 5 : bytes_of(t.k * code_bits(job));
}

int64_t value_bytes(const Job &job, const Tensor &t) {
  if (has_coder(job, t)) return coder_scale_bytes(job, t) + code_bytes(job, t);
  return scale_bytes(job.kind_of(t), t.k) + bytes_of(t.k * value_bits(job, t));
}

bool sends_all(const Tensor &t) { return t.index == NONE || t.index == AS_IS; }

int64_t low_bits(int64_t n, int64_t k) {
  int64_t best = 0;
  for (int64_t l = 1; l <= 31; ++l)
    if (k * l + ((n - k) >> l) < k * best + ((n - k) >> best)) best = l;
  return best;
}

int64_t map_bits(const Tensor &t) { return t.k + ((t.numel - t.k) >> low_bits(t.numel, t.k)); }

int64_t index_bytes(const Tensor &t) {
  if (sends_all(t)) return 0;
  if (t.index != PACKED) return t.index * t.k;
  return bytes_of(t.k * low_bits(t.numel, t.k)) + bytes_of(map_bits(t));
}

uint64_t bits_at(const uint8_t *data, int64_t bit, int64_t count) {
  uint64_t value = 0;
  for (int64_t i = 0; i < count; ++i)
    value |= (uint64_t)(data[(bit + i) / 8] >> (bit + i) % 8 & 1) << i;
  return value;
}

bool all_zero(const uint8_t *data, int64_t from, int64_t to) {
  for (; from < to; ++from)
    if (bits_at(data, from, 1)) return false;
  return true;
}

/* The indices of a payload, as many as there are. */
std::vector<int64_t> indices_of(const Tensor &t, const uint8_t *payload) {
  const uint8_t *data = payload + t.index_at;
  std::vector<int64_t> found;
  if (t.index != PACKED) {
    for (int64_t i = 0; i < t.k; ++i)
      found.push_back(sends_all(t) ? i : (int64_t)bits_at(data, i * t.index * 8, t.index * 8));
    return found;
  }
  const int64_t low = low_bits(t.numel, t.k);
  const uint8_t *map = data + bytes_of(t.k * low);
  for (int64_t bit = 0; bit < map_bits(t); ++bit) {
    if (!bits_at(map, bit, 1)) continue;
    auto j = (int64_t)found.size();
    int64_t lower = j < t.k ? (int64_t)bits_at(data, j * low, low) : 0;
    found.push_back(((bit - j) << low) + lower + j);
  }
  return found;
}

bool are_sound(const Tensor &t, const std::vector<int64_t> &index) {
  for (size_t i = 1; i < index.size(); ++i)
    if (index[i - 1] >= index[i]) return false;
  return (int64_t)index.size() == t.k && index.back() < t.numel;
}

float float_of(uint64_t bits, int64_t kind) {
  float value;
  auto word = (uint32_t)(kind == BRAIN ? bits << 16 : bits);
  if (kind == HALF) {
    auto rest = (int)(bits & 0x3ff), exponent = (int)(bits >> 10 & 31);
    float magnitude = exponent == 31   ? rest ? NAN : INFINITY
                      : exponent == 0 ? std::ldexp((float)rest, -24)
                                      : std::ldexp((float)(rest + 1024), exponent - 25);
    return bits >> 15 ? -magnitude : magnitude;
  }
  std::memcpy(&value, &word, 4);
  return value;
}

float brain_at(const uint8_t *data, int64_t i) { return float_of(bits_at(data, 16 * i, 16), BRAIN); }

float whole_at(const uint8_t *data, int64_t i) { return float_of(bits_at(data, 32 * i, 32), FULL); }

/* Code i of TernGrad, of which five share a byte in base 3. */
int digit_of(const uint8_t *codes, int64_t i) {
  static const int weights[] = {1, 3, 9, 27, 81};
  const int rest = codes[i / 5] / weights[i % 5];
  return i % 5 == 4 ? rest : rest % 3;
}

/* Value i of a coder, as the method's docstring has it. */
float coded_value_of(const Job &job, const Tensor &t, const uint8_t *data, int64_t i) {
  const int64_t block = i / t.block;
  if (job.kind == TERNARY) return whole_at(data, 0) * (float)(digit_of(data + 4, i) - 1);
  auto code = (int)bits_at(data + coder_scale_bytes(job, t), i * code_bits(job), code_bits(job));
  if (job.kind == MINMAX) {
    volatile float offset = whole_at(data, blocks(t) + block) * (float)code;
    return (whole_at(data, block) + offset) * 2;
  }
  if (job.kind == MEANS) return code ? -brain_at(data, blocks(t) + block) : brain_at(data, block);
  return brain_at(data, block) * (float)(code - ((1 << (job.bits - 1)) - 1));
}

/* Value i, where residuals are float32. */
float value_of(const Job &job, const Tensor &t, const uint8_t *payload, int64_t i) {
  const uint8_t *data = payload + t.value_at;
  if (has_coder(job, t)) return coded_value_of(job, t, data, i);
  int64_t width = value_bits(job, t), at = scale_bytes(job.kind_of(t), t.k);
  uint64_t bits = bits_at(data + at, i * width, width);
  if (!at) return float_of(bits, job.kind_of(t));
  const int64_t kind = job.kind_of(t), block = i / block_of(kind);
  if (has_magnitudes(kind)) {
    const int64_t region = (int64_t)bits % scales_of(kind);
    const float scale = float_of(bits_at(data, (block * scales_of(kind) + region) * 16, 16), BRAIN);
    return bits >> (width - 1) ? -scale : scale;
  }
  float scale = float_of(bits_at(data, block * 16, 16), BRAIN);
  auto j = (int64_t)(bits << (64 - width)) >> (64 - width);
  return scale * (float)j;
}

Job draw_job(Input &input) {
  static const int64_t sizes[] = {1, 3, 63, 64, 65, 200, 2047, 4096, 5000, 70000};
  static const int64_t block_sizes[] = {1, 16, 37, 128, 512, 513, 2048, 5001, 100000};
  Job job{input.number(1) % 4 ? 4 : 8, input.below(KINDS), 24 + 8, (int64_t)input.number(1) % 2,
          input.number(1) % 2 ? 1 : 1 + input.below(4), 1, 2 + input.below(7), {}};
  if (job.kind >= MINMAX) job.keeps = input.number(1) % 4 != 0;
  for (int64_t t = 1 + input.below(4); t > 0; --t) {
    static const int64_t kinds[] = {NONE, PACKED, PACKED, SHORT, LONG, AS_IS};
    Tensor tensor{};
    tensor.numel = sizes[input.below(10)];
    tensor.index = kinds[input.below(6)];
    if (job.kind >= MINMAX && tensor.index != AS_IS) tensor.index = NONE;
    tensor.block = block_sizes[input.below(9)];
    if (job.kind == TERNARY) tensor.block = tensor.numel;
    if (tensor.index == SHORT && tensor.numel > 65536) tensor.index = LONG;
    tensor.k = !sends_all(tensor) ? 1 + input.below(tensor.numel) : tensor.numel;
    if (!sends_all(tensor) && input.number(1) % 2) tensor.k = 1 + tensor.k / 50;
    tensor.dtype = job.residual_bytes == 8 ? 3 : input.below(3);
    tensor.first = input.below(job.parts);
    tensor.value_at = job.payload_bytes;
    tensor.index_at = tensor.value_at + value_bytes(job, tensor);
    job.payload_bytes = tensor.index_at + index_bytes(tensor);
    job.tensors.push_back(tensor);
  }
  return job;
}

int64_t width_of(int64_t dtype) { return dtype == 3 ? 8 : dtype == 2 ? 4 : 2; }

/* Raw bits now and then; else few magnitudes, so that there are ties. */
void draw_values(Input &input, uint8_t *to, int64_t bytes, int64_t width) {
  std::minstd_rand random((unsigned)input.number(4));
  bool raw = input.number(1) % 4 == 0;
  for (int64_t i = 0; i < bytes; i += width) {
    uint64_t bits = random() | (uint64_t)random() << 32;
    if (!raw && width == 8) bits = (bits & 0x8007000000000000u) | 0x3ff0000000000000u;
    if (!raw && width == 4) bits = (bits & 0x80700000u) | 0x3f800000u;
    if (!raw && width == 2) bits = (bits & 0x8300u) | 0x3c00u;
    std::memcpy(to + i, &bits, (size_t)width);
  }
}

bool is_scale(float scale) { return std::isfinite(scale) && scale >= 0; }

/* Whether a coder can have written scales and codes. */
bool are_sound_codes(const Job &job, const Tensor &t, const uint8_t *payload) {
  const uint8_t *data = payload + t.value_at;
  if (job.kind == TERNARY) {
    for (int64_t i = 0; i < t.k / 5; ++i)
      if (data[4 + i] > 242) return false;
    return is_scale(whole_at(data, 0));
  }
  for (int64_t i = 0; i < blocks(t); ++i) {
    if (job.kind == MINMAX) {
      if (!std::isfinite(whole_at(data, i)) || !is_scale(whole_at(data, blocks(t) + i))) return false;
    } else {
      if (!is_scale(brain_at(data, i))) return false;
      if (job.kind == MEANS && !is_scale(brain_at(data, blocks(t) + i))) return false;
    }
  }
  for (int64_t i = 0; job.kind < TERNARY && job.kind >= DITHERED && i < t.k; ++i)
    if (bits_at(data + coder_scale_bytes(job, t), i * job.bits, job.bits) == (1u << job.bits) - 1)
      return false;
  return true;
}

/* What a writer has to keep to: sound indices, no bit beyond a section, no negative scale, none of
 * the multiples that have no opposite. */
void check_format(const Job &job, const uint8_t *payload) {
  for (const Tensor &t : job.tensors) {
    REQUIRE(are_sound(t, indices_of(t, payload)));
    if (has_coder(job, t)) {
      REQUIRE(are_sound_codes(job, t, payload));
      for (int64_t i = t.k; job.kind == TERNARY && i < (t.k + 4) / 5 * 5; ++i)
        REQUIRE(digit_of(payload + t.value_at + 4, i) == 0);
      if (job.kind == TERNARY) continue;
      REQUIRE(all_zero(payload + t.value_at, 8 * coder_scale_bytes(job, t) + t.k * code_bits(job),
                       8 * value_bytes(job, t)));
      continue;
    }
    const uint8_t *values = payload + t.value_at + scale_bytes(job.kind_of(t), t.k);
    const int64_t low = t.k * low_bits(t.numel, t.k), width = value_bits(job, t);
    REQUIRE(all_zero(values, t.k * width, 8 * bytes_of(t.k * width)));
    for (int64_t i = 0; i < scale_bytes(job.kind_of(t), t.k) / 2; ++i)
      REQUIRE(bits_at(payload + t.value_at, 16 * i, 16) < 0x7f80);
    for (int64_t i = 0; (job.kind_of(t) == INT8 || job.kind_of(t) == INT4) && i < t.k; ++i)
      REQUIRE(bits_at(values, i * width, width) != (uint64_t)1 << (width - 1));
    if (t.index != PACKED) continue;
    const uint8_t *data = payload + t.index_at;
    REQUIRE(all_zero(data, low, 8 * bytes_of(low)));
    REQUIRE(all_zero(data + bytes_of(low), map_bits(t), 8 * bytes_of(map_bits(t))));
  }
}

double ulp_of(double value) {
  auto near = (float)std::fabs(value);
  return (double)std::nextafter(near, INFINITY) - (double)near;
}

/* Whether e + g == decode(p) + what is left, where residuals are float32: exactly, but for
 * magnitudes that several values share, and for what float16 saturates by far. */
bool adds_up(int64_t kind, float owed, float sent, float rest) {
  double error = std::fabs((double)sent + (double)rest - (double)owed);
  double largest = std::max({std::fabs(owed), std::fabs(sent), std::fabs(rest)});
  bool rounded = has_magnitudes(kind) || (kind == HALF && std::fabs(owed) >= 0x1p29f);
  return rounded ? error <= ulp_of(largest) : error == 0;
}

float float_at(const uint8_t *data, int64_t i) {
  float value;
  std::memcpy(&value, data + 4 * i, 4);
  return value;
}

/* Nothing is lost, and nothing that is not sent is larger than what is. */
void check_laws(const Job &job, const Tensor &t, const uint8_t *e, const uint8_t *g,
                const uint8_t *left, const uint8_t *payload) {
  const std::vector<int64_t> index = indices_of(t, payload);
  float least_sent = INFINITY, largest_left = 0;
  for (int64_t i = 0, next = 0; i < t.numel; ++i) {
    bool is_sent = next < t.k && index[(size_t)next] == i;
    float sent = is_sent ? value_of(job, t, payload, next++) : 0;
    float owed = float_at(e, i) + float_at(g, job.natural(t, i)), rest = float_at(left, i);
    if (!std::isfinite(owed)) continue;
    if (has_coder(job, t)) {
      volatile float expected = job.keeps ? owed - sent : 0;
      REQUIRE(rest == expected);
      continue;
    }
    REQUIRE(adds_up(job.kind_of(t), owed, sent, rest));
    if (is_sent) least_sent = std::min(least_sent, std::fabs(owed));
    else largest_left = std::max(largest_left, std::fabs(owed));
  }
  REQUIRE(job.sampled || largest_left <= least_sent);
}

/* gradient == half the sum of the payloads, in their order. */
void check_decoded(const Job &job, const Tensor &t, const uint8_t *gathered, int64_t ranks,
                   const uint8_t *gradient) {
  std::vector<float> total((size_t)t.numel);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const uint8_t *payload = gathered + rank * job.payload_bytes;
    const std::vector<int64_t> index = indices_of(t, payload);
    for (int64_t i = 0; i < t.k; ++i)
      total[(size_t)index[(size_t)i]] += value_of(job, t, payload, i);
  }
  for (int64_t i = 0; i < t.numel; ++i) {
    float expected = total[(size_t)i] * 0.5f, found = float_at(gradient, job.natural(t, i));
    REQUIRE(expected == found || (std::isnan(expected) && std::isnan(found)));
  }
}

bool are_scales(const Job &job, const Tensor &t, const uint8_t *payload) {
  if (has_coder(job, t)) return are_sound_codes(job, t, payload);
  for (int64_t i = 0; i < scale_bytes(job.kind_of(t), t.k) / 2; ++i) {
    const float scale = float_of(bits_at(payload + t.value_at, 16 * i, 16), BRAIN);
    if (!std::isfinite(scale) || scale < 0) return false;
  }
  return true;
}

/* The first rank * tensors + tensor whose scales or indices are wrong, or -1. */
int64_t first_wrong(const Job &job, const uint8_t *gathered, int64_t ranks,
                    const std::vector<uint8_t> &flags) {
  auto tensors = (int64_t)job.tensors.size();
  for (int64_t i = 0; i < ranks * tensors; ++i) {
    const Tensor &t = job.tensors[(size_t)(i % tensors)];
    const uint8_t *payload = gathered + i / tensors * job.payload_bytes;
    if (flags[(size_t)(i % tensors)]) continue;
    if (!are_scales(job, t, payload)) return i;
    if (!sends_all(t) && !are_sound(t, indices_of(t, payload))) return i;
  }
  return -1;
}

/* m u + g, rounded twice, in memory of exactly that size. */
void check_velocity(Input &input, size_t offset, int threads) {
  const int64_t count = input.below(5000);
  Memory u((size_t)count * 4, offset), g((size_t)count * 4, offset);
  draw_values(input, u.data(), count * 4, 4);
  draw_values(input, g.data(), count * 4, 4);
  Memory out((size_t)count * 4, offset);
  topkef_update_velocity(u.data(), 0.9, g.data(), out.data(), count, 4, threads);
  for (int64_t i = 0; i < count; ++i) {
    volatile float kept = 0.9f * float_at(u.data(), i);
    float expected = kept + float_at(g.data(), i), found = float_at(out.data(), i);
    REQUIRE(expected == found || (std::isnan(expected) && std::isnan(found)));
  }
}

/* What encoding leaves. */
struct Encoded {
  std::vector<uint8_t> payload;
  std::vector<std::vector<uint8_t>> left;

  explicit Encoded(const Job &job) : payload((size_t)job.payload_bytes, 0xee) {
    for (const Tensor &t : job.tensors) left.emplace_back((size_t)(t.numel * job.residual_bytes));
  }
  /* Of a tensor with a NaN only flag and indices count: addition may take the bits of either. */
  void forget_nans(const Job &job) {
    for (size_t t = 0; t < left.size(); ++t)
      if (payload[24 + t / 8] >> t % 8 & 1) {
        const Tensor &tensor = job.tensors[t];
        std::memset(&payload[(size_t)tensor.value_at], 0, (size_t)value_bytes(job, tensor));
        std::fill(left[t].begin(), left[t].end(), 0);
      }
  }
};

/* Shards that go together become what each becomes by itself. */
void check_shards(const Job &job, const std::vector<const void *> &residuals,
                  const std::vector<const void *> &gradients, int threads) {
  const auto count = (size_t)std::min<int64_t>(job.parts, 3);
  std::vector<topkef_bucket *> buckets;
  std::vector<Encoded> alone, together;
  std::vector<const void *> e;
  Job shard = job;
  for (size_t s = 0; s < count; ++s, shard = shard.next_shard()) {
    auto recipe = shard.recipe();
    buckets.push_back(topkef_bucket_new(recipe.data(), (int64_t)recipe.size()));
    alone.emplace_back(shard);
    together.emplace_back(shard);
    std::vector<void *> left;
    for (auto &each : alone[s].left) left.push_back(each.data());
    topkef_encode(buckets[s], residuals.data(), gradients.data(), left.data(),
                  alone[s].payload.data(), nullptr, KEYS + 3 * s * job.tensors.size(), threads);
    topkef_bucket_free(buckets[s]);
    buckets[s] = topkef_bucket_new(recipe.data(), (int64_t)recipe.size());
    e.insert(e.end(), residuals.begin(), residuals.end());
  }
  std::vector<void *> left;
  std::vector<uint8_t *> payloads;
  for (Encoded &each : together) {
    payloads.push_back(each.payload.data());
    for (auto &room : each.left) left.push_back(room.data());
  }
  topkef_encode_shards(buckets.data(), (int64_t)count, e.data(), gradients.data(), left.data(),
                       payloads.data(), nullptr, KEYS, threads);
  for (topkef_bucket *each : buckets) topkef_bucket_free(each);
  for (size_t s = 0; s < count; ++s) {
    alone[s].forget_nans(job);
    together[s].forget_nans(job);
    REQUIRE(alone[s].payload == together[s].payload);
    REQUIRE(alone[s].left == together[s].left);
  }
}

void run(const uint8_t *data, size_t size) {
  Input input(data, size);
  Job job = draw_job(input);
  auto recipe = job.recipe();
  topkef_bucket *bucket = topkef_bucket_new(recipe.data(), (int64_t)recipe.size());
  REQUIRE(bucket);
  size_t offset = (size_t)input.below(9);
  int threads = 1 + (int)input.below(3);
  std::vector<Memory> residuals, candidates, gradients;
  for (const Tensor &t : job.tensors) {
    residuals.emplace_back((size_t)(t.numel * job.residual_bytes), offset);
    candidates.emplace_back((size_t)(t.numel * job.residual_bytes), offset);
    gradients.emplace_back((size_t)(job.gradient_numel(t) * width_of(t.dtype)), offset);
  }
  const int64_t ranks = 2;
  Memory gathered((size_t)(job.payload_bytes * ranks), offset);
  std::vector<uint8_t> flags(job.tensors.size());
  std::vector<void *> outputs;
  for (Memory &each : gradients) outputs.push_back(each.data());
  for (int64_t rank = 0; rank < ranks; ++rank) {
    uint8_t *payload = gathered.data() + rank * job.payload_bytes;
    std::vector<const void *> e, g;
    std::vector<void *> left;
    for (size_t t = 0; t < job.tensors.size(); ++t) {
      draw_values(input, gradients[t].data(), (int64_t)(gradients[t].room.size() - offset),
                  width_of(job.tensors[t].dtype));
      e.push_back(residuals[t].data());
      g.push_back(gradients[t].data());
      left.push_back(candidates[t].data());
    }
    if (job.parts > 1) check_shards(job, e, g, threads);
    std::memset(payload + 32, 0xff, (size_t)(job.payload_bytes - 32));
    topkef_encode(bucket, e.data(), g.data(), left.data(), payload, nullptr, KEYS, threads);
    check_format(job, payload);
    for (size_t t = 0; t < job.tensors.size(); ++t)
      if (job.residual_bytes == 4 && job.tensors[t].dtype == 2)
        check_laws(job, job.tensors[t], residuals[t].data(), gradients[t].data(),
                   candidates[t].data(), payload);
    std::swap(residuals, candidates);
  }
  auto decode = [&] {
    return topkef_decode(bucket, gathered.data(), ranks, 0.5, flags.data(), outputs.data(), threads);
  };
  REQUIRE(decode() == -1);
  for (size_t t = 0; t < job.tensors.size(); ++t)
    if (job.residual_bytes == 4 && job.tensors[t].dtype == 2)
      check_decoded(job, job.tensors[t], gathered.data(), ranks, gradients[t].data());
  for (int64_t damage = 1 + input.below(20); damage > 0; --damage)
    gathered.data()[32 + input.below(job.payload_bytes * ranks - 32)] = (uint8_t)input.number(1);
  check_velocity(input, offset, threads);
  for (uint8_t &flag : flags) flag = input.number(1) % 4 == 0;
  auto rooms = [&] {
    std::vector<std::vector<uint8_t>> copies;
    for (const Memory &each : gradients) copies.push_back(each.room);
    return copies;
  };
  auto before = rooms();
  int64_t wrong = decode();
  REQUIRE(wrong == first_wrong(job, gathered.data(), ranks, flags));
  REQUIRE(wrong < 0 || before == rooms());
  topkef_bucket_free(bucket);
}

/* A recipe of arbitrary numbers is refused, or works. */
void run_any_recipe(const uint8_t *data, size_t size) {
  Input input(data, size);
  std::vector<int64_t> recipe((size_t)input.below(40));
  for (int64_t &each : recipe) each = (int64_t)input.number(1 + (int)input.below(8));
  topkef_bucket_free(topkef_bucket_new(recipe.data(), (int64_t)recipe.size()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  run(data, size);
  run_any_recipe(data, size);
  return 0;
}

#ifndef TOPKEF_LIBFUZZER
int main(int count, char **arguments) {
  double seconds = count > 1 ? std::atof(arguments[1]) : 10;
  std::mt19937 random(count > 2 ? (unsigned)std::atoi(arguments[2]) : 1);
  auto start = std::chrono::steady_clock::now();
  auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  long runs = 0;
  for (; elapsed() < seconds; ++runs) {
    std::vector<uint8_t> input(256);
    for (uint8_t &byte : input) byte = (uint8_t)random();
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%s: %ld inputs\n", topkef_isa(), runs);
}
#endif
