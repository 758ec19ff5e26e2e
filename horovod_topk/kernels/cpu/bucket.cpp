/* The C interface of a bucket: divides a bucket's tensors among threads. */
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "float_formats.h"
#include "passes.h"
#include "tensor.h"
#include "topkef.h"
#include "topk/weights.h"
#include "workers.h"

namespace topkef {

#if defined(__x86_64__)
namespace {

/* What the processor has and the system saves. Asked of the processor itself: Zig's compiler, which
 * compiles the released wheels, answers __builtin_cpu_supports with no. */
struct Processor {
  bool avx2 = false, avx512 = false;

  Processor() {
    unsigned eax, ebx, ecx, edx, saved, high;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return;
    const unsigned needed = bit_OSXSAVE | bit_AVX | bit_F16C | bit_POPCNT;
    if ((ecx & needed) != needed || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    const unsigned ymm = 0x06, zmm = 0xe6;  // registers that the system saves, as bits of XCR0
    const unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    avx2 = (saved & ymm) == ymm && (ebx & bit_AVX2) && (ebx & bit_BMI);
    avx512 = avx2 && (saved & zmm) == zmm && (ebx & wide) == wide;
  }
};

}  // namespace
#endif

const Passes *fastest_passes() {
  const char *asked = std::getenv("HOROVOD_TOPK_ISA");
  std::string limit = asked ? asked : "";
#if defined(__x86_64__)
  const Processor has;
  if (limit == "portable") return portable_passes();
  if (has.avx512 && limit != "avx2")
    if (auto passes = avx512_passes()) return passes;
  if (has.avx2)
    if (auto passes = avx2_passes()) return passes;
#endif
  return portable_passes();
}

}  // namespace topkef

using namespace topkef;

namespace {

#ifndef TOPKEF_SPLIT
#define TOPKEF_SPLIT (1 << 19)
#endif
constexpr int64_t SPLIT = TOPKEF_SPLIT;  // least elements of a thread
#ifndef TOPKEF_TOGETHER
#define TOPKEF_TOGETHER (8 * SHARD_BLOCK)
#endif
constexpr int64_t TOGETHER = TOPKEF_TOGETHER;  // elements of shards encoded in one pass
constexpr int64_t TILE = 4096;           // elements summed at a time, within the first-level cache
constexpr int64_t HEAD = 9, EACH = 10;    // numbers in a recipe for the bucket, and for each tensor

struct Task {
  int64_t tensor, part, parts;
};

struct Chunk {
  int64_t tensor, from, to;
};

}  // namespace

struct topkef_bucket {
  BucketRecipe recipe;
  std::vector<TensorRecipe> tensors;
  std::vector<std::unique_ptr<Encoder>> encoders;
  const Passes *passes;
  std::vector<uint8_t> finite;  // one for each tensor

  int64_t parts(int64_t tensor, int threads) const {
    return std::clamp<int64_t>(tensors[(size_t)tensor].numel / SPLIT, 1, threads);
  }
};

namespace {

/* Small enough that no sum or product below overflows. */
bool is_size(int64_t number) { return number >= 0 && number <= int64_t{1} << 48; }

bool fits(const BucketRecipe &bucket, int64_t at, int64_t bytes) {
  return is_size(at) && at + bytes <= bucket.payload_bytes;
}

bool is_index(int64_t kind) { return kind == PACKED || kind == SHORT || kind == LONG; }

bool is_sound(const BucketRecipe &bucket, const TensorRecipe &tensor) {
  if (!is_size(tensor.numel) || !is_size(tensor.k) || tensor.k > tensor.numel) return false;
  const int64_t most = tensor.index == SHORT ? int64_t{1} << 16 : int64_t{1} << 32;
  if (tensor.block < 0 || tensor.block > int64_t{1} << 40) return false;
  if (bucket.has_coder() && tensor.index == NONE && tensor.block < 1) return false;
  if (bucket.kind == TERNARY && tensor.index == NONE && tensor.block < tensor.numel) return false;
  bool has_index = !bucket.has_coder() && is_index(tensor.index);
  bool sends_some = has_index && tensor.k >= 1 && tensor.numel <= most;
  bool sends_all = tensor.sends_all() && tensor.k == tensor.numel;
  return (sends_some || sends_all) && tensor.dtype >= 0 && tensor.dtype < DTYPES &&
         (tensor.dtype == FLOAT64) == (bucket.residual_bytes == 8) &&
         fits(bucket, tensor.value_at, value_bytes(bucket, tensor)) &&
         fits(bucket, tensor.index_at, index_bytes(tensor)) && tensor.first >= 0 &&
         tensor.first < bucket.parts && is_size(tensor.gradient) &&
         tensor.gradient < bucket.tensors;
}

bool is_sound(const BucketRecipe &bucket, int64_t count) {
  return bucket.tensors > 0 && bucket.tensors <= count && count == HEAD + EACH * bucket.tensors &&
         (bucket.residual_bytes == 4 || bucket.residual_bytes == 8) && bucket.kind >= 0 &&
         bucket.kind < KINDS && is_size(bucket.payload_bytes) && bucket.parts >= 1 &&
         bucket.parts <= 1 << 16 && bucket.bits >= 0 && bucket.bits <= 8 &&
         (bucket.keeps == 1 || (bucket.keeps == 0 && bucket.has_coder())) &&
         (bucket.bits >= 2 || !(bucket.kind == DITHERED || bucket.kind == DITHERED_L2)) &&
         fits(bucket, bucket.flags_at, (bucket.tensors + 7) / 8);
}

void write_flags(const topkef_bucket &bucket, uint8_t *payload) {
  uint8_t *flags = payload + bucket.recipe.flags_at;
  std::memset(flags, 0, (size_t)((bucket.recipe.tensors + 7) / 8));
  for (size_t t = 0; t < bucket.tensors.size(); ++t)
    if (!bucket.finite[t]) flags[t / 8] |= (uint8_t)(1u << t % 8);
}

/* The indices of all ranks, 4 bytes each: in the payloads, or unpacked. */
class Indices {
 public:
  Indices(const topkef_bucket &bucket, const uint8_t *gathered, int64_t ranks)
      : bucket_(bucket), gathered_(gathered), ranks_(ranks) {
    int64_t room = 0;
    for (const TensorRecipe &tensor : bucket.tensors) {
      offset_.push_back(room);
      if (is_unpacked(tensor)) room += tensor.k * ranks;
    }
    static thread_local std::vector<uint32_t> memory;  // reused, and grown if needed
    if ((int64_t)memory.size() < room) memory.resize((size_t)room);
    memory_ = memory.data();
  }

  /* Returns -1, or the first rank * tensors + tensor whose indices or scales are not valid. */
  int64_t unpack(const uint8_t *flags, int threads) {
    const int64_t tensors = bucket_.recipe.tensors;
    std::vector<uint8_t> wrong((size_t)(tensors * ranks_));
    parallel(tensors * ranks_, threads, [&](int64_t i) {
      const TensorRecipe &tensor = bucket_.tensors[(size_t)(i % tensors)];
      if (flags[i % tensors]) return;
      const uint8_t *payload = gathered_ + i / tensors * bucket_.recipe.payload_bytes;
      const auto is_sound = bucket_.passes->is_sound[bucket_.recipe.kind_of(tensor)];
      wrong[(size_t)i] = is_sound && !is_sound(payload + tensor.value_at, tensor.k,
                                               bucket_.recipe.format(tensor));
      if (tensor.sends_all() || wrong[(size_t)i]) return;
      uint32_t *to = is_unpacked(tensor) ? own(i % tensors) + i / tensors * tensor.k : nullptr;
      wrong[(size_t)i] = !bucket_.passes->unpack_index[tensor.index](
          payload + tensor.index_at, tensor.k, tensor.numel, to);
    });
    auto first = std::find(wrong.begin(), wrong.end(), 1);
    return first == wrong.end() ? -1 : first - wrong.begin();
  }

  Rows rows(int64_t t, int64_t *read) const {
    const TensorRecipe &tensor = bucket_.tensors[(size_t)t];
    const int64_t stride = bucket_.recipe.payload_bytes;
    Rows rows{gathered_ + tensor.value_at, gathered_ + tensor.index_at, stride, stride, ranks_,
              tensor.k, read, bucket_.recipe.format(tensor)};
    if (!is_unpacked(tensor)) return rows;
    rows.indices = reinterpret_cast<const uint8_t *>(own(t));
    rows.indices_stride = tensor.k * (int64_t)sizeof(uint32_t);
    return rows;
  }

 private:
  static bool is_unpacked(const TensorRecipe &tensor) {
    return tensor.index == PACKED || tensor.index == SHORT;
  }

  uint32_t *own(int64_t t) const { return memory_ + offset_[(size_t)t]; }

  const topkef_bucket &bucket_;
  const uint8_t *const gathered_;
  const int64_t ranks_;
  std::vector<int64_t> offset_;  // of each tensor, in numbers
  uint32_t *memory_;
};

/* One tensor in each of several shards of a bucket, or in the only one. */
struct Group {
  topkef_bucket *const *shards;
  int64_t count, tensor;
  const void *const *residuals, *const *gradients;
  void *const *candidates;
  uint8_t *const *payloads;
  const topkef_correction *correction;
  const int64_t *keys;
  const uint64_t *least_squares;  // bits, one for each tensor, shard after shard; null: there are no squares

  const TensorRecipe &recipe(int64_t s) const { return shards[s]->tensors[(size_t)tensor]; }

  Encoder &encoder(int64_t s) const { return *shards[s]->encoders[(size_t)tensor]; }

  Source source(int64_t s) const {
    const int64_t at = s * shards[0]->recipe.tensors + tensor, g = recipe(s).gradient;
    Source source{residuals[at], gradients[g], candidates[at]};
    if (keys) source.key = keys + 3 * at;
    if (correction && correction->scales) source.scale = correction->scales[at];
    if (least_squares && !recipe(s).sends_all()) {
      source.squares = correction->squares[g];
      source.least_square = least_squares[at];
    }
    if (!correction || !correction->velocities) return source;
    source.velocity = correction->velocities[g];
    source.following = correction->following[g];
    source.momentum = correction->momentum;
    source.nesterov = correction->nesterov != 0;
    return source;
  }

  /* Number of threads that work on it. */
  int64_t parts(int threads) const {
    int64_t most = 1;
    for (int64_t s = 0; s < count; ++s) most = std::max(most, shards[s]->parts(tensor, threads));
    return most;
  }

  /* Whether one pass over the gradient serves all shards. */
  bool go_together() const {
    bool all = count > 1;
    for (int64_t s = 0; s < count && all; ++s)
      all = !recipe(s).sends_all() && recipe(s).numel >= TOGETHER;
    return all;
  }

  void begin(int64_t parts) const {
    for (int64_t s = 0; s < count; ++s) encoder(s).begin(source(s), {parts, go_together(), s});
  }

  void gather(int64_t part) const {
    if (go_together()) {
      gather_together(part);
    } else {
      for (int64_t s = 0; s < count; ++s) encoder(s).gather(source(s), payloads[s], part);
    }
  }

  void finish() const {
    for (int64_t s = 0; s < count; ++s) finish(s);
  }

  /* Encode all of it in one thread. */
  void encode() const {
    if (go_together()) {
      begin(1);
      gather_together(0);
      finish();
      return;
    }
    for (int64_t s = 0; s < count; ++s) {
      encoder(s).begin(source(s), {});
      encoder(s).gather(source(s), payloads[s], 0);
      finish(s);
    }
  }

 private:
  void finish(int64_t s) const {
    shards[s]->finite[(size_t)tensor] = encoder(s).finish(source(s), payloads[s]);
  }

  void gather_together(int64_t part) const {
    std::vector<Shard> all;
    for (int64_t s = 0; s < count; ++s)
      all.push_back({source(s), encoder(s).stretch(part), recipe(s).first});
    std::sort(all.begin(), all.end(), [](auto &a, auto &b) { return a.first < b.first; });
    auto pass = shards[0]->passes->gather_shards[recipe(0).dtype];
    for (bool done = false; !done;) {
      pass(all.data(), count, shards[0]->recipe.parts);
      done = true;
      for (int64_t s = 0; s < count; ++s) done &= encoder(s).relieve(source(s), part);
    }
  }
};

/* The least square that has a weight of its own, for each tensor of each shard; empty without squares. */
std::vector<uint64_t> least_squares_of(topkef_bucket *const *shards, int64_t count,
                                       const topkef_correction *correction, int threads) {
  if (!correction || !correction->squares) return {};
  const int64_t tensors = shards[0]->recipe.tensors;
  std::vector<uint64_t> found((size_t)(count * tensors));
  parallel(count * tensors, threads, [&](int64_t i) {
    const topkef_bucket &shard = *shards[i / tensors];
    const TensorRecipe &tensor = shard.tensors[(size_t)(i % tensors)];
    const void *squares = correction->squares[tensor.gradient];
    if (!squares || tensor.sends_all()) return;
    const ShardLayout layout = shard.recipe.shard_layout(tensor);
    found[(size_t)i] = shard.recipe.residual_bytes == 8
                           ? least_square(static_cast<const double *>(squares), tensor.numel, layout)
                           : least_square(static_cast<const float *>(squares), tensor.numel, layout);
  });
  return found;
}

/* How many of one rank's indices are below `from`. */
int64_t entries_before(const Rows &rows, int64_t rank, int64_t from) {
  auto index = reinterpret_cast<const uint32_t *>(rows.indices + rank * rows.indices_stride);
  int64_t low = 0, high = rows.entries;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if ((int64_t)load(index, middle) < from)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

void fill_with_nan(void *total, int64_t count, int64_t width) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  if (width == 8)
    std::fill_n(static_cast<double *>(total), count, nan);
  else
    std::fill_n(static_cast<float *>(total), count, (float)nan);
}

/* Sum and deliver a stretch of one tensor, tile by tile; all NaN if it is flagged. */
void decode_chunk(const topkef_bucket &bucket, const Chunk &chunk, const Indices &indices,
                  int64_t ranks, double scale, bool is_flagged, void *gradient) {
  const TensorRecipe &tensor = bucket.tensors[(size_t)chunk.tensor];
  static thread_local std::vector<int64_t> read;
  read.assign((size_t)ranks, 0);
  const Rows rows = indices.rows(chunk.tensor, read.data());
  if (!is_flagged && !tensor.sends_all() && chunk.from > 0)
    for (int64_t rank = 0; rank < ranks; ++rank)
      read[(size_t)rank] = entries_before(rows, rank, chunk.from);
  auto sum = (tensor.sends_all() ? bucket.passes->add
                                 : bucket.passes->scatter)[bucket.recipe.kind_of(tensor)];
  const int64_t width = dtype_bytes(tensor.dtype);
  alignas(64) double total[TILE];
  std::memset(total, 0, (size_t)(TILE * bucket.recipe.residual_bytes));  // `deliver` leaves zeros
  for (int64_t at = chunk.from; at < chunk.to; at += TILE) {
    int64_t count = std::min(TILE, chunk.to - at);
    if (is_flagged)
      fill_with_nan(total, count, bucket.recipe.residual_bytes);
    else
      sum(total, at, count, &rows);
    const ShardLayout layout = bucket.recipe.shard_layout(tensor);
    for (int64_t run = layout.parts > 1 ? SHARD_BLOCK : count, i = 0; i < count; i += run)
      bucket.passes->deliver[tensor.dtype](element(total, i, bucket.recipe.residual_bytes), scale,
                                           element(gradient, layout.natural(at + i), width),
                                           std::min(run, count - i));
  }
  bucket.passes->fence();
}

}  // namespace

#ifndef TOPKEF_DIGEST
#define TOPKEF_DIGEST ""
#endif

const char *topkef_digest(void) { return TOPKEF_DIGEST; }

const char *topkef_isa(void) { return fastest_passes()->isa; }

topkef_bucket *topkef_bucket_new(const int64_t *recipe, int64_t count) {
  if (count < HEAD) return nullptr;
  BucketRecipe head{recipe[0], recipe[1], recipe[2], recipe[3], recipe[4], recipe[5], recipe[6], recipe[7], recipe[8]};
  if (!is_sound(head, count)) return nullptr;
  auto bucket = std::make_unique<topkef_bucket>();
  bucket->recipe = head;
  bucket->passes = head.residual_bytes == 8 ? double_passes() : fastest_passes();
  bucket->finite.resize((size_t)head.tensors);
  for (const int64_t *at = recipe + HEAD; at < recipe + count; at += EACH) {
    TensorRecipe tensor{at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9]};
    if (!is_sound(head, tensor)) return nullptr;
    bucket->tensors.push_back(tensor);
    bucket->encoders.push_back(make_encoder(head, tensor, bucket->passes));
  }
  return bucket.release();
}

void topkef_bucket_free(topkef_bucket *bucket) { delete bucket; }

void topkef_encode(topkef_bucket *bucket, const void *const *residuals,
                   const void *const *gradients, void *const *candidates, uint8_t *payload,
                   const topkef_correction *correction, const int64_t *keys, int threads) {
  topkef_encode_shards(&bucket, 1, residuals, gradients, candidates, &payload, correction, keys,
                       threads);
}

void topkef_encode_shards(topkef_bucket *const *shards, int64_t count, const void *const *residuals,
                          const void *const *gradients, void *const *candidates,
                          uint8_t *const *payloads, const topkef_correction *correction,
                          const int64_t *keys, int threads) {
  KeepDenormals keep;  // each task has one of its own, for its own thread
  threads = std::max(threads, 1);
  const std::vector<uint64_t> least = least_squares_of(shards, count, correction, threads);
  std::vector<Group> groups;
  std::vector<Task> tasks;
  std::vector<int64_t> split;
  for (int64_t t = 0; t < shards[0]->recipe.tensors; ++t) {
    const Group group{shards,     count,    t,          residuals, gradients,
                      candidates, payloads, correction, keys,      least.empty() ? nullptr : least.data()};
    const int64_t parts = group.parts(threads);
    groups.push_back(group);
    for (int64_t p = 0; p < parts; ++p) tasks.push_back({t, p, parts});
    if (parts == 1) continue;
    split.push_back(t);
    group.begin(parts);
  }
  parallel((int64_t)tasks.size(), threads, [&](int64_t i) {
    auto [t, part, parts] = tasks[(size_t)i];
    const Group &group = groups[(size_t)t];
    if (parts == 1) {
      group.encode();
    } else {
      group.gather(part);
    }
  });
  parallel((int64_t)split.size(), threads, [&](int64_t i) {
    groups[(size_t)split[(size_t)i]].finish();
  });
  for (int64_t s = 0; s < count; ++s) write_flags(*shards[s], payloads[s]);
}

int64_t topkef_decode(const topkef_bucket *bucket, const uint8_t *gathered, int64_t ranks,
                      double scale, const uint8_t *flags, void *const *gradients, int threads) {
  Indices indices(*bucket, gathered, ranks);
  int64_t wrong = indices.unpack(flags, threads);
  if (wrong >= 0) return wrong;
  std::vector<Chunk> chunks;
  for (int64_t t = 0; t < bucket->recipe.tensors; ++t)
    for (int64_t at = 0; at < bucket->tensors[(size_t)t].numel; at += CHUNK)
      chunks.push_back({t, at, std::min(at + CHUNK, bucket->tensors[(size_t)t].numel)});
  parallel((int64_t)chunks.size(), threads, [&](int64_t i) {
    const Chunk &chunk = chunks[(size_t)i];
    void *gradient = gradients[bucket->tensors[(size_t)chunk.tensor].gradient];
    decode_chunk(*bucket, chunk, indices, ranks, scale, flags[chunk.tensor] != 0, gradient);
  });
  return -1;
}
