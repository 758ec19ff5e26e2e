/* Encodes a tensor whose elements are all sent. */
#include "tensor.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "baselines/coders.h"
#include "codes.h"
#include "float_formats.h"
#include "topk/index_coding.h"

namespace topkef {

namespace {

/* Encodes a tensor whose elements are all sent, part by part. Sums stay in the cache until they are
 * written, except for blocks that are too long for it, which are read twice. */
class WholeTensor final : public Encoder {
 public:
  WholeTensor(const BucketRecipe &bucket, const TensorRecipe &tensor, const Passes *passes)
      : bucket_(bucket), tensor_(tensor), kind_(bucket.kind_of(tensor)),
        unit_(kind_ >= MINMAX ? std::lcm<int64_t>(8, tensor.block) : PACE),
        encode_blocks_(passes->encode_blocks[tensor.dtype][kind_]), passes_(passes) {}

  void begin(const Source &, const Division &division) override {
    finite_.assign((size_t)division.parts, 1);
  }

  void gather(const Source &source, uint8_t *payload, int64_t part) override {
    auto parts = (int64_t)finite_.size();
    const int64_t from = beginning(tensor_.numel, part, parts, unit_);
    const int64_t to = beginning(tensor_.numel, part + 1, parts, unit_);
    uint8_t *data = payload + tensor_.value_at;
    finite_[(size_t)part] = !encode_blocks_       ? encode_values(source, from, to, data)
                            : tensor_.block > KEPT ? encode_long(source, from, to, data)
                                                   : encode_short(source, from, to, data);
    passes_->fence();
  }

  bool finish(const Source &, uint8_t *) override {
    return std::all_of(finite_.begin(), finite_.end(), [](uint8_t finite) { return finite; });
  }

 private:
  Format format_of(const Source &source) const {
    Format format = bucket_.format(tensor_);
    format.draws = kind_ >= DITHERED;
    format.past_caches = true;
    if (source.key)
      format.key = {{(uint32_t)source.key[0], (uint32_t)source.key[1]}, source.key[2]};
    return format;
  }

  ShardLayout layout() const { return bucket_.shard_layout(tensor_); }

  /* Memory of the new residual from element `at` on. */
  void *candidate(const Source &source, int64_t at) const {
    return static_cast<uint8_t *>(source.candidate) + at * bucket_.residual_bytes;
  }

  void sum(const Source &source, int64_t at, int64_t count) const {
    passes_->sum[tensor_.dtype](source, at, count, memory_, layout());
  }

  /* Values of fixed formats. */
  bool encode_values(const Source &source, int64_t from, int64_t to, uint8_t *data) const {
    bool finite = true;
    for (int64_t at = from; at < to; at += PACE) {
      const int64_t count = std::min(PACE, to - at);
      sum(source, at, count);
      finite &= passes_->pack[kind_](memory_, {at, count, tensor_.numel}, data, memory_, format_of(source));
      passes_->stream(memory_, candidate(source, at), count);
    }
    return finite;
  }

  bool encode_short(const Source &source, int64_t from, int64_t to, uint8_t *data) const {
    return encode_blocks_(source, layout(), {from, to - from, tensor_.numel}, data, format_of(source),
                          memory_);
  }

  bool encode_long(const Source &source, int64_t from, int64_t to, uint8_t *data) const {
    bool finite = true;
    for (int64_t at = from; at < to; at += tensor_.block)
      finite &= encode_block(source, at, std::min(tensor_.block, to - at), data);
    return finite;
  }

  bool encode_block(const Source &source, int64_t at, int64_t count, uint8_t *data) const {
    const Format format = format_of(source);
    Source glance = source;
    glance.following = nullptr;  // the second pass stores new velocities
    Pairs pairs;
    bool finite = true;
    for (int64_t i = 0; i < count; i += FOLDED) {
      const int64_t some = std::min(FOLDED, count - i);
      Measured found;
      sum(glance, at + i, some);
      finite &= passes_->measure[kind_](memory_, some, format, &found);
      pairs.add(found);
    }
    const Measured found = pairs.all();
    for (int64_t i = 0; i < count; i += FOLDED) {
      const int64_t some = std::min(FOLDED, count - i);
      sum(source, at + i, some);
      passes_->write_tile[kind_](memory_, {at + i, some, tensor_.numel}, found, data,
                                 candidate(source, at + i), format);
    }
    return finite;
  }

  const BucketRecipe bucket_;
  const TensorRecipe tensor_;
  const int64_t kind_, unit_;  // parts begin at multiples of the unit
  const EncodeBlocks encode_blocks_;  // null for values of fixed formats
  const Passes *const passes_;
  std::vector<uint8_t> finite_;  // one for each part
  static thread_local double memory_[KEPT + PACE];
};

alignas(64) thread_local double WholeTensor::memory_[KEPT + PACE];

}  // namespace

std::unique_ptr<Encoder> make_encoder(const BucketRecipe &bucket, const TensorRecipe &tensor,
                                      const Passes *passes) {
  if (tensor.sends_all()) return std::make_unique<WholeTensor>(bucket, tensor, passes);
  return make_topk(bucket, tensor, passes);
}

int64_t value_bytes(const BucketRecipe &bucket, const TensorRecipe &tensor) {
  const Format format = bucket.format(tensor);
  switch (const int64_t kind = bucket.kind_of(tensor); kind) {
    case MINMAX: return MinMax::bytes(tensor.k, format);
    case MEANS: return Means::bytes(tensor.k, format);
    case DITHERED:
    case DITHERED_L2: return Dithered<false>::bytes(tensor.k, format);
    case TERNARY: return Ternary::bytes(tensor.k, format);
    default: return ::value_bytes(kind, tensor.k, bucket.residual_bytes);
  }
}

int64_t index_bytes(const TensorRecipe &tensor) {
  return tensor.sends_all() ? 0 : ::index_bytes(tensor.index, tensor.numel, tensor.k);
}

}  // namespace topkef
