/* The C interface of the CPU kernels: one bucket encoded or decoded in one call.
 *
 * Nothing here knows a framework: arrays are pointers to packed elements in row-major order, of any
 * alignment. What a call needs to know of the plan is a recipe, laid out as in the docstring of
 * `horovod_topk.ops.protocol.Fused`. Results are the same bits as those of the verbs in
 * `horovod_topk.ops`, whatever the instruction set and the number of threads.
 */
#ifndef TOPKEF_H
#define TOPKEF_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TOPKEF_API __attribute__((visibility("default")))

typedef struct topkef_bucket topkef_bucket;

/* What the library was compiled from, as kernels/compile.py has it: a caller of another version must
 * not go on. */
TOPKEF_API const char *topkef_digest(void);

/* The instruction set in use: "avx512", "avx2" or "portable". HOROVOD_TOPK_ISA chooses a lower one
 * than the processor has. */
TOPKEF_API const char *topkef_isa(void);

/* A bucket for a recipe of `count` numbers; NULL if the recipe is not one. Not more than one thread
 * may use a bucket at a time. */
TOPKEF_API topkef_bucket *topkef_bucket_new(const int64_t *recipe, int64_t count);
TOPKEF_API void topkef_bucket_free(topkef_bucket *bucket);

/* What becomes of residuals and gradients before they are added up, and of velocities u afterwards:
 *
 *     a = scale * e + u'        u' = momentum * u + g
 *     a = scale * e + (momentum * u' + g)  with `nesterov`
 *     u' -= loss * u'           where a was sent, but in tensors that are sent whole
 *     u' -= loss * min(1, |u'| / |a|) * u'   there with `graded`
 *
 * Velocities are of the residuals' dtype, which is the gradients' then, and lie as the gradients do. */
typedef struct topkef_correction {
  const double *scales;           /* one a tensor, shard after shard; NULL: all are 1 */
  const void *const *velocities;  /* one a gradient, as all that follow; NULL: there are none */
  void *const *following;         /* become u'; must overlap nothing else */
  const double *momenta;
  const uint8_t *nesterov;        /* 0 or 1 */
  const double *losses;           /* in [0, 1] */
  int graded;                     /* 0 or 1, for all */
} topkef_correction;

/* Write flags, values and indices into `payload`, and into the candidates what is not sent.
 *
 * residuals, candidates: a pointer a tensor; candidates must overlap nothing else. gradients: as many
 * pointers as the recipe's tensors refer to. correction: NULL for none. keys: what random numbers follow from, three numbers a
 * tensor, shard after shard: the two words of a key, and how many steps were committed; NULL where the
 * kind of values draws none. */
TOPKEF_API void topkef_encode(topkef_bucket *bucket, const void *const *residuals,
                              const void *const *gradients, void *const *candidates,
                              uint8_t *payload, const topkef_correction *correction,
                              const int64_t *keys, int threads);

/* The same for shards of one bucket, buckets of which each has the same tensors and gradients: in one
 * pass over these, as far as it goes.
 *
 * residuals, candidates: a pointer a tensor, shard after shard. payloads: one a shard. */
TOPKEF_API void topkef_encode_shards(topkef_bucket *const *shards, int64_t count,
                                     const void *const *residuals, const void *const *gradients,
                                     void *const *candidates, uint8_t *const *payloads,
                                     const topkef_correction *correction, const int64_t *keys,
                                     int threads);

/* Replace gradients by `scale` times the sum over `ranks` payloads, added in their order.
 *
 * flags: a byte a tensor; where it is not 0 the gradient becomes NaN and the entries are not read.
 * Returns -1, or rank * tensors + tensor for the first indices that do not ascend or lie outside
 * their tensor: nothing has been written then. */
TOPKEF_API int64_t topkef_decode(const topkef_bucket *bucket, const uint8_t *gathered,
                                 int64_t ranks, double scale, const uint8_t *flags,
                                 void *const *gradients, int threads);

/* out = residual + gradient, `count` elements; residual and out have 4 or 8 bytes, `dtype` is the
 * gradient's as in a recipe. Returns 1 if all of `out` are finite, else 0. */
TOPKEF_API int topkef_compensate(const void *residual, const void *gradient, void *out, int64_t count,
                                 int width, int dtype, int threads);

/* out[i] = values[index[i]], elements of 4 or 8 bytes. */
TOPKEF_API void topkef_take(const void *values, const int64_t *index, void *out, int64_t count, int width);

/* out[index[i]] -= values[i]; indices are unique, elements have 4 or 8 bytes. */
TOPKEF_API void topkef_subtract_at(void *out, const int64_t *index, const void *values, int64_t count,
                                   int width);

/* One index of each of k stretches of `numel` elements, of which number i begins at i * numel / k; see `horovod_topk.ops.protocol.Ops.random_index`. key: two words, and how many steps were
 * committed. */
TOPKEF_API void topkef_random_index(const int64_t *key, int64_t numel, int64_t k, int64_t *out);

/* The largest magnitude, the sum and the sum of squares of `count` elements of 4 or 8 bytes, taken as
 * `horovod_topk.ops.protocol.Ops.finite` has them, added in the order of `Ops.sums`. out: three numbers. */
TOPKEF_API void topkef_moments(const void *values, int64_t count, int width, int threads, double *out);

/* The bytes of `horovod_topk.methods.TernGrad`, of `count` elements of 4 or 8 bytes whose magnitudes are
 * clipped to `limit`. key: two words, and how many steps were committed. */
TOPKEF_API void topkef_pack_ternary(const void *values, int64_t count, int width, float limit, float scale,
                                    const int64_t *key, uint8_t *out, int threads);

/* out = factor * velocity + gradient, `count` elements of 4 or 8 bytes; `out` may be `velocity`. */
TOPKEF_API void topkef_update_velocity(const void *velocity, double factor, const void *gradient,
                                  void *out, int64_t count, int width, int threads);

/* `count` random numbers of 1 to 32 bits; see `horovod_topk.ops.protocol.Ops.random_bits`. key: as in
 * `topkef_random_index`. */
TOPKEF_API void topkef_random_bits(const int64_t *key, int64_t count, int bits, int64_t *out);

/* out = scale * left right, or out -= left right if `subtracts`: [m, k] times [k, n], elements of 4 or 8
 * bytes. Added in order of k, each product and sum rounded: the same bits on every processor. */
TOPKEF_API void topkef_product(const void *left, const void *right, int64_t m, int64_t k, int64_t n,
                               double scale, int subtracts, void *out, int width, int threads);

/* Make `count` rows of `length` elements orthonormal, in place; as horovod_topk/ops/orthonormal.py. */
TOPKEF_API void topkef_orthonormal(void *rows, int64_t count, int64_t length, int width);

#ifdef __cplusplus
}
#endif

#endif
