/* The C interface: a bucket's tensors, dealt out to threads. */
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "number.h"
#include "passes.h"
#include "tensor.h"
#include "topkef.h"
#include "workers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace topkef;

namespace {

constexpr int64_t PROBE = 16;            // entries a tensor that `topkef_unchanged` looks at
#ifndef TOPKEF_SPLIT
#define TOPKEF_SPLIT (1 << 19)
#endif
constexpr int64_t SPLIT = TOPKEF_SPLIT;  // elements a thread should have at least
constexpr int64_t TILE = 4096;           // elements summed at a time, within the first-level cache
constexpr int64_t CHUNK = 64 * TILE;     // elements decoded by one task
constexpr int64_t HEAD = 6, EACH = 7;    // numbers of a recipe: for the bucket, for a tensor

const Passes *fastest_passes() {
  const char *asked = std::getenv("HOROVOD_TOPK_ISA");
  std::string limit = asked ? asked : "";
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi");  // and so F16C
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (limit == "portable") return portable_passes();
  if (avx512 && limit != "avx2")
    if (auto passes = avx512_passes()) return passes;
  if (avx2)
    if (auto passes = avx2_passes()) return passes;
#endif
  return portable_passes();
}

/* Denormals are kept while this lives, whatever a framework has set for its thread. */
class KeepDenormals {
#if defined(__x86_64__)
 public:
  KeepDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#elif defined(__aarch64__)
 public:
  KeepDenormals() : before_(get()) { set(before_ & ~(uint64_t{1} << 24)); }
  ~KeepDenormals() { set(before_); }

 private:
  static uint64_t get() {
    uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void set(uint64_t control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
  const uint64_t before_;
#else
 public:
  ~KeepDenormals() {}
#endif
};

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
  std::vector<uint8_t> finite;  // one a tensor

  int64_t parts(int64_t tensor, int threads) const {
    return std::clamp<int64_t>(tensors[(size_t)tensor].numel / SPLIT, 1, threads);
  }
};

namespace {

/* Small enough that no sum or product below overflows. */
bool is_size(int64_t number) { return number >= 0 && number <= int64_t{1} << 48; }

bool fits(const BucketRecipe &bucket, int64_t at, int64_t count, int64_t width) {
  return is_size(at) && is_size(count) && at + count * width <= bucket.payload_bytes;
}

bool is_sound(const BucketRecipe &bucket, const TensorRecipe &tensor) {
  bool has_index = tensor.index_bytes == 2 || tensor.index_bytes == 4;
  bool sends_some = has_index && tensor.k >= 1 && tensor.k <= tensor.numel &&
                    tensor.numel <= int64_t{1} << 8 * tensor.index_bytes;
  bool sends_all = tensor.index_bytes == 0 && tensor.k == tensor.numel;
  return is_size(tensor.numel) && (sends_some || sends_all) && tensor.dtype >= 0 &&
         tensor.dtype < DTYPES && (tensor.dtype == FLOAT64) == (bucket.residual_bytes == 8) &&
         fits(bucket, tensor.value_at, tensor.k, bucket.value_bytes) &&
         fits(bucket, tensor.index_at, tensor.k, tensor.index_bytes);
}

bool is_sound(const BucketRecipe &bucket, int64_t count) {
  return bucket.tensors > 0 && bucket.tensors <= count && count == HEAD + EACH * bucket.tensors &&
         (bucket.residual_bytes == 4 || bucket.residual_bytes == 8) &&
         (bucket.value_bytes == 2 || bucket.value_bytes == bucket.residual_bytes) &&
         is_size(bucket.payload_bytes) && fits(bucket, bucket.flags_at, (bucket.tensors + 7) / 8, 1);
}

void write_flags(const topkef_bucket &bucket, uint8_t *payload) {
  uint8_t *flags = payload + bucket.recipe.flags_at;
  std::memset(flags, 0, (size_t)((bucket.recipe.tensors + 7) / 8));
  for (size_t t = 0; t < bucket.tensors.size(); ++t)
    if (!bucket.finite[t]) flags[t / 8] |= (uint8_t)(1u << t % 8);
}

/* Indices of one tensor in one payload. */
bool ascends(const topkef_bucket &bucket, const TensorRecipe &tensor, const uint8_t *payload) {
  auto check = bucket.passes->ascends[tensor.index_bytes == 4];
  return !tensor.index_bytes || check(payload + tensor.index_at, tensor.k, tensor.numel);
}

int64_t first_wrong(const topkef_bucket &bucket, const uint8_t *gathered, int64_t ranks,
                    const uint8_t *flags) {
  for (int64_t rank = 0; rank < ranks; ++rank)
    for (int64_t t = 0; t < bucket.recipe.tensors; ++t)
      if (!flags[t] && !ascends(bucket, bucket.tensors[(size_t)t],
                                gathered + rank * bucket.recipe.payload_bytes))
        return rank * bucket.recipe.tensors + t;
  return -1;
}

/* Element of entry i in one payload. */
int64_t element(const TensorRecipe &tensor, const uint8_t *payload, int64_t i) {
  const uint8_t *index = payload + tensor.index_at;
  if (tensor.index_bytes == 4) return (int64_t)load(reinterpret_cast<const uint32_t *>(index), i);
  if (tensor.index_bytes == 2) return (int64_t)load(reinterpret_cast<const uint16_t *>(index), i);
  return i;
}

/* How many of a tensor's entries in one payload lie before `from`. */
int64_t entries_before(const TensorRecipe &tensor, const uint8_t *payload, int64_t from) {
  int64_t low = 0, high = tensor.index_bytes && from ? tensor.k : 0;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (element(tensor, payload, middle) < from)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/* Sum and deliver a stretch of one tensor, tile by tile. */
void decode_chunk(const topkef_bucket &bucket, const Chunk &chunk, const uint8_t *gathered,
                  int64_t ranks, double scale, void *gradient) {
  const TensorRecipe &tensor = bucket.tensors[(size_t)chunk.tensor];
  const int64_t stride = bucket.recipe.payload_bytes;
  static thread_local std::vector<int64_t> read;
  read.resize((size_t)ranks);
  for (int64_t rank = 0; rank < ranks; ++rank)
    read[(size_t)rank] = entries_before(tensor, gathered + rank * stride, chunk.from);
  Rows rows{gathered, stride, ranks, tensor.value_at, tensor.index_at, tensor.k, read.data()};
  auto sum = tensor.index_bytes
                 ? bucket.passes->scatter[bucket.recipe.halves()][tensor.index_bytes == 4]
                 : bucket.passes->add[bucket.recipe.halves()];
  const int64_t width = dtype_bytes(tensor.dtype);
  alignas(64) double total[TILE];
  for (int64_t at = chunk.from; at < chunk.to; at += TILE) {
    int64_t count = std::min(TILE, chunk.to - at);
    std::memset(total, 0, (size_t)(count * bucket.recipe.residual_bytes));
    sum(total, at, count, &rows);
    bucket.passes->deliver[tensor.dtype](total, scale, static_cast<uint8_t *>(gradient) + at * width,
                                         count);
  }
  bucket.passes->fence();
}

void poison(const topkef_bucket &bucket, const Chunk &chunk, void *gradient) {
  const TensorRecipe &tensor = bucket.tensors[(size_t)chunk.tensor];
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (int64_t i = chunk.from; i < chunk.to; ++i) switch (tensor.dtype) {
      case FLOAT16: store(static_cast<Half *>(gradient), i, narrow<Half>(nan)); break;
      case BFLOAT16: store(static_cast<Brain *>(gradient), i, narrow<Brain>(nan)); break;
      case FLOAT32: store(static_cast<float *>(gradient), i, (float)nan); break;
      default: store(static_cast<double *>(gradient), i, nan);
    }
}

/* What `tensor_is_unchanged` will read lies all over memory: ask for it beforehand. */
void prefetch_probe(const topkef_bucket &bucket, const TensorRecipe &tensor, const void *residual,
                    const void *gradient, const uint8_t *payload) {
  const int64_t width = dtype_bytes(tensor.dtype);
  for (int64_t i = 0; i < std::min(PROBE, tensor.k); ++i) {
    int64_t at = element(tensor, payload, i);
    __builtin_prefetch(static_cast<const uint8_t *>(residual) + at * bucket.recipe.residual_bytes);
    __builtin_prefetch(static_cast<const uint8_t *>(gradient) + at * width);
  }
}

bool tensor_is_unchanged(const topkef_bucket &bucket, const TensorRecipe &tensor,
                         const void *residual, const void *gradient, const uint8_t *payload) {
  for (int64_t i = 0; i < std::min(PROBE, tensor.k); ++i) {
    const uint8_t *sent = payload + tensor.value_at + i * bucket.recipe.value_bytes;
    if (!entry_is(bucket.recipe, tensor, residual, gradient, element(tensor, payload, i), sent))
      return false;
  }
  return true;
}

}  // namespace

#ifndef TOPKEF_DIGEST
#define TOPKEF_DIGEST ""
#endif

const char *topkef_digest(void) { return TOPKEF_DIGEST; }

const char *topkef_isa(void) { return fastest_passes()->isa; }

topkef_bucket *topkef_bucket_new(const int64_t *recipe, int64_t count) {
  if (count < HEAD) return nullptr;
  BucketRecipe head{recipe[0], recipe[1], recipe[2], recipe[3], recipe[4], recipe[5]};
  if (!is_sound(head, count)) return nullptr;
  auto bucket = std::make_unique<topkef_bucket>();
  bucket->recipe = head;
  bucket->passes = head.residual_bytes == 8 ? double_passes() : fastest_passes();
  bucket->finite.resize((size_t)head.tensors);
  for (const int64_t *at = recipe + HEAD; at < recipe + count; at += EACH) {
    TensorRecipe tensor{at[0], at[1], at[2], at[3], at[4], at[5], at[6]};
    if (!is_sound(head, tensor)) return nullptr;
    bucket->tensors.push_back(tensor);
    bucket->encoders.push_back(make_encoder(head, tensor, bucket->passes));
  }
  return bucket.release();
}

void topkef_bucket_free(topkef_bucket *bucket) { delete bucket; }

void topkef_encode(topkef_bucket *bucket, const void *const *residuals,
                   const void *const *gradients, void *const *candidates, uint8_t *payload,
                   int threads) {
  KeepDenormals keep;  // each task has one of its own, for its own thread
  threads = std::max(threads, 1);
  auto source = [&](int64_t t) { return Source{residuals[t], gradients[t], candidates[t]}; };
  std::vector<Task> tasks;
  std::vector<int64_t> split;
  for (int64_t t = 0; t < bucket->recipe.tensors; ++t) {
    int64_t parts = bucket->parts(t, threads);
    for (int64_t p = 0; p < parts; ++p) tasks.push_back({t, p, parts});
    if (parts == 1) continue;
    split.push_back(t);
    bucket->encoders[(size_t)t]->begin(source(t), parts);
  }
  auto finish = [&](int64_t t) {
    bucket->finite[(size_t)t] = bucket->encoders[(size_t)t]->finish(source(t), payload);
  };
  parallel((int64_t)tasks.size(), threads, [&](int64_t i) {
    KeepDenormals keep;
    auto [t, part, parts] = tasks[(size_t)i];
    Encoder &encoder = *bucket->encoders[(size_t)t];
    if (parts == 1) encoder.begin(source(t), 1);
    encoder.gather(source(t), payload, part);
    if (parts == 1) finish(t);
  });
  parallel((int64_t)split.size(), threads, [&](int64_t i) {
    KeepDenormals keep;
    finish(split[(size_t)i]);
  });
  write_flags(*bucket, payload);
}

int topkef_unchanged(const topkef_bucket *bucket, const void *const *residuals,
                     const void *const *gradients, const uint8_t *payload) {
  KeepDenormals keep;
  for (int64_t t = 0; t < bucket->recipe.tensors; ++t)
    prefetch_probe(*bucket, bucket->tensors[(size_t)t], residuals[t], gradients[t], payload);
  for (int64_t t = 0; t < bucket->recipe.tensors; ++t)
    if (!tensor_is_unchanged(*bucket, bucket->tensors[(size_t)t], residuals[t], gradients[t],
                             payload))
      return 0;
  return 1;
}

int64_t topkef_decode(const topkef_bucket *bucket, const uint8_t *gathered, int64_t ranks,
                      double scale, const uint8_t *flags, void *const *gradients, int threads) {
  int64_t wrong = first_wrong(*bucket, gathered, ranks, flags);
  if (wrong >= 0) return wrong;
  std::vector<Chunk> chunks;
  for (int64_t t = 0; t < bucket->recipe.tensors; ++t)
    for (int64_t at = 0; at < bucket->tensors[(size_t)t].numel; at += CHUNK)
      chunks.push_back({t, at, std::min(at + CHUNK, bucket->tensors[(size_t)t].numel)});
  parallel((int64_t)chunks.size(), threads, [&](int64_t i) {
    KeepDenormals keep;
    const Chunk &chunk = chunks[(size_t)i];
    if (flags[chunk.tensor])
      poison(*bucket, chunk, gradients[chunk.tensor]);
    else
      decode_chunk(*bucket, chunk, gathered, ranks, scale, gradients[chunk.tensor]);
  });
  return -1;
}
