/* One tensor of a bucket: its place in the payload, and how it is encoded. */
#ifndef TOPKEF_TENSOR_H
#define TOPKEF_TENSOR_H

#include <cstdint>
#include <memory>

#include "passes.h"

namespace topkef {

inline int64_t dtype_bytes(int64_t dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

struct TensorRecipe {
  int64_t numel, k, start, index_bytes, value_at, index_at, dtype;
};

struct BucketRecipe {
  int64_t tensors, residual_bytes, value_bytes, flags_at, payload_bytes, sampled;

  int halves() const { return value_bytes == 2; }
};

/* Where a tensor's elements are. */
struct Source {
  const void *residual, *gradient;
  void *candidate;
};

/* Encodes one tensor, in parts that may run at the same time:
 *
 *     begin(source, parts); gather(source, payload, 0 ... parts - 1); finish(source, payload)
 *
 * With one part, all three are called by the same thread, one after the other. */
class Encoder {
 public:
  virtual ~Encoder() = default;
  virtual void begin(const Source &source, int64_t parts) = 0;
  virtual void gather(const Source &source, uint8_t *payload, int64_t part) = 0;
  /* Returns whether all elements are finite. */
  virtual bool finish(const Source &source, uint8_t *payload) = 0;
};

std::unique_ptr<Encoder> make_encoder(const BucketRecipe &bucket, const TensorRecipe &tensor,
                                        const Passes *passes);

/* Whether e + g of one element would be sent as these bytes; NaN is equal to NaN. */
bool entry_is(const BucketRecipe &bucket, const TensorRecipe &tensor, const void *residual,
              const void *gradient, int64_t element, const uint8_t *sent);

}  // namespace topkef

#endif
