/* One tensor of a bucket: its place in the payload, and how it is encoded. */
#ifndef TOPKEF_TENSOR_H
#define TOPKEF_TENSOR_H

#include <cstdint>
#include <memory>

#include "passes.h"

namespace topkef {

struct TensorRecipe {
  int64_t numel, k, start, index, value_at, index_at, dtype, first, gradient, block;

  bool sends_all() const { return index == NONE || index == AS_IS; }
};

struct BucketRecipe {
  int64_t tensors, residual_bytes, kind, flags_at, payload_bytes, sampled, parts, keeps, bits;

  int64_t kind_of(const TensorRecipe &tensor) const { return tensor.index == AS_IS ? (int64_t)FULL : kind; }
  bool has_coder() const { return kind >= MINMAX; }
  Format format(const TensorRecipe &tensor) const { return {tensor.block, bits, keeps != 0, false, false, {}}; }
  ShardLayout shard_layout(const TensorRecipe &tensor) const { return {parts, tensor.first}; }
};

/* How a tensor is divided for encoding. */
struct Division {
  int64_t parts = 1;    // parts that may run at the same time
  bool together = false;  // in one pass with other shards of the same gradient
  int64_t slot = 0;     // which of a thread's lists it uses; unique among concurrent tensors
};

/* Encodes one tensor, in parts that may run at the same time:
 *
 *     begin(source, division); gather(source, payload, 0 ... parts - 1); finish(source, payload)
 *
 * With one part, the same thread calls all three, one after the other. Shards in one pass use
 * `Passes::gather_shards` instead of `gather`, and then `relieve`, until it returns true. */
class Encoder {
 public:
  virtual ~Encoder() = default;
  virtual void begin(const Source &source, const Division &division) = 0;
  virtual void gather(const Source &source, uint8_t *payload, int64_t part) = 0;
  /* The stretch of a part; null if it selects no elements. */
  virtual Stretch *stretch(int64_t) { return nullptr; }
  /* Make room in a part's full lists; returns whether the part is done. */
  virtual bool relieve(const Source &, int64_t) { return true; }
  /* Returns whether all elements are finite. */
  virtual bool finish(const Source &source, uint8_t *payload) = 0;
};

std::unique_ptr<Encoder> make_encoder(const BucketRecipe &bucket, const TensorRecipe &tensor,
                                        const Passes *passes);

std::unique_ptr<Encoder> make_topk(const BucketRecipe &bucket, const TensorRecipe &tensor, const Passes *passes);

/* The begin of a stretch, in a tensor that is divided into `count` at multiples of `unit`. */
inline int64_t beginning(int64_t numel, int64_t stretch, int64_t count, int64_t unit = PACE) {
  return stretch == count ? numel : numel / count * stretch / unit * unit;
}

/* Bytes of a tensor's values and of its indices. */
int64_t value_bytes(const BucketRecipe &bucket, const TensorRecipe &tensor);
int64_t index_bytes(const TensorRecipe &tensor);

}  // namespace topkef

#endif
