/* A fuzz target for encode and decode: any recipe, any values, any damage to a payload.
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

struct Tensor {
  int64_t numel, k, index_bytes, value_at, index_at, dtype;
};

struct Job {
  int64_t residual_bytes, value_bytes, payload_bytes, sampled;
  std::vector<Tensor> tensors;

  std::vector<int64_t> recipe() const {
    std::vector<int64_t> numbers{(int64_t)tensors.size(), residual_bytes, value_bytes, 24,
                                 payload_bytes, sampled};
    for (const Tensor &t : tensors)
      numbers.insert(numbers.end(), {t.numel, t.k, 0, t.index_bytes, t.value_at, t.index_at, t.dtype});
    return numbers;
  }
};

Job draw_job(Input &input) {
  static const int64_t sizes[] = {1, 3, 63, 64, 65, 200, 2047, 4096, 5000, 70000};
  Job job{input.number(1) % 4 ? 4 : 8, 0, 24 + 8, (int64_t)input.number(1) % 2, {}};
  job.value_bytes = input.number(1) % 2 ? 2 : job.residual_bytes;
  for (int64_t t = 1 + input.below(4); t > 0; --t) {
    Tensor tensor{};
    tensor.numel = sizes[input.below(10)];
    tensor.index_bytes = input.number(1) % 3 == 0 ? 0 : tensor.numel <= 65536 && input.number(1) % 2 ? 2 : 4;
    tensor.k = tensor.index_bytes ? 1 + input.below(tensor.numel) : tensor.numel;
    if (tensor.index_bytes && input.number(1) % 2) tensor.k = 1 + tensor.k / 50;
    tensor.dtype = job.residual_bytes == 8 ? 3 : input.below(3);
    tensor.value_at = job.payload_bytes;
    tensor.index_at = tensor.value_at + tensor.k * job.value_bytes;
    job.payload_bytes = tensor.index_at + tensor.k * tensor.index_bytes;
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

int64_t index_of(const Tensor &t, const uint8_t *payload, int64_t i) {
  uint32_t value = 0;
  std::memcpy(&value, payload + t.index_at + i * t.index_bytes, (size_t)t.index_bytes);
  return value;
}

void check_indices(const Job &job, const uint8_t *payload) {
  for (const Tensor &t : job.tensors)
    for (int64_t i = 0; t.index_bytes && i < t.k; ++i) {
      REQUIRE(index_of(t, payload, i) < t.numel);
      REQUIRE(i == 0 || index_of(t, payload, i - 1) < index_of(t, payload, i));
    }
}

/* e + g == decode(p) + what is left, for float32 throughout. */
void check_conservation(const Tensor &t, const uint8_t *e, const uint8_t *g, const uint8_t *left,
                        const uint8_t *payload) {
  std::vector<float> sent((size_t)t.numel);
  for (int64_t i = 0; i < t.k; ++i)
    std::memcpy(&sent[(size_t)(t.index_bytes ? index_of(t, payload, i) : i)],
                payload + t.value_at + 4 * i, 4);
  for (int64_t i = 0; i < t.numel; ++i) {
    float residual, gradient, rest;
    std::memcpy(&residual, e + 4 * i, 4);
    std::memcpy(&gradient, g + 4 * i, 4);
    std::memcpy(&rest, left + 4 * i, 4);
    float owed = residual + gradient;
    if (std::isfinite(owed)) REQUIRE(sent[(size_t)i] + rest == owed);
  }
}

/* Nothing that is left is larger than what was sent. */
void check_largest(const Tensor &t, const uint8_t *left, const uint8_t *payload) {
  float least_sent = std::numeric_limits<float>::infinity(), largest_left = 0;
  for (int64_t i = 0; i < t.k; ++i) {
    float value;
    std::memcpy(&value, payload + t.value_at + 4 * i, 4);
    if (!std::isnan(value)) least_sent = std::min(least_sent, std::fabs(value));
  }
  for (int64_t i = 0; i < t.numel; ++i) {
    float value;
    std::memcpy(&value, left + 4 * i, 4);
    if (std::isfinite(value)) largest_left = std::max(largest_left, std::fabs(value));
  }
  REQUIRE(largest_left <= least_sent);
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
    gradients.emplace_back((size_t)(t.numel * width_of(t.dtype)), offset);
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
    topkef_encode(bucket, e.data(), g.data(), left.data(), payload, threads);
    check_indices(job, payload);
    REQUIRE(topkef_unchanged(bucket, e.data(), g.data(), payload));
    for (size_t t = 0; t < job.tensors.size(); ++t)
      if (job.residual_bytes == 4 && job.value_bytes == 4 && job.tensors[t].dtype == 2)
      {
        check_conservation(job.tensors[t], residuals[t].data(), gradients[t].data(),
                           candidates[t].data(), payload);
        if (!job.sampled) check_largest(job.tensors[t], candidates[t].data(), payload);
      }
    std::swap(residuals, candidates);
  }
  REQUIRE(topkef_decode(bucket, gathered.data(), ranks, 0.5, flags.data(), outputs.data(), threads) < 0);
  for (int64_t damage = 1 + input.below(20); damage > 0; --damage)
    gathered.data()[32 + input.below(job.payload_bytes * ranks - 32)] = (uint8_t)input.number(1);
  for (uint8_t &flag : flags) flag = input.number(1) % 4 == 0;
  topkef_decode(bucket, gathered.data(), ranks, 0.5, flags.data(), outputs.data(), threads);
  topkef_bucket_free(bucket);
}

/* A recipe of arbitrary numbers is refused, or works. */
void run_any_recipe(const uint8_t *data, size_t size) {
  Input input(data, size);
  std::vector<int64_t> recipe((size_t)input.below(30));
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
