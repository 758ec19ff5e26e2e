/* The C interface of the CPU kernels: one bucket encoded or decoded in one call.
 *
 * It is independent of frameworks: arrays are pointers to contiguous elements in row-major order, of any
 * alignment. A recipe has all that a call needs of the plan; its layout is in the docstring of
 * `horovod_topk.ops.protocol.Fused`. Results have the same bits as those of the operations in
 * `horovod_topk.ops`, for any instruction set and number of threads.
 */
#ifndef TOPKEF_H
#define TOPKEF_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TOPKEF_API __attribute__((visibility("default")))

typedef struct topkef_bucket topkef_bucket;

/* The digest of the sources that the library was compiled from, as in kernels/compile.py: a caller with
 * another digest must not use it. */
TOPKEF_API const char *topkef_digest(void);

/* The instruction set in use: "avx512", "avx2" or "portable". HOROVOD_TOPK_ISA selects a lower one than
 * the processor supports. */
TOPKEF_API const char *topkef_isa(void);

/* Make a bucket for a recipe of `count` numbers; NULL if the recipe is not valid. Only one thread may
 * use a bucket at a time. */
TOPKEF_API topkef_bucket *topkef_bucket_new(const int64_t *recipe, int64_t count);
TOPKEF_API void topkef_bucket_free(topkef_bucket *bucket);

/* Rescaling and momentum correction of residuals e, gradients g and velocities u:
 *
 *     a = scale * e + u'        u' = momentum * u + g
 *     a = scale * e + (momentum * u' + g)  with `nesterov`
 *     u' = 0                    where a was sent, but in tensors that are sent whole
 *
 * Velocities and gradients then have the residuals' dtype, and velocities the gradients' layout. With
 * squares v, of the same dtype and layout, the largest |a| v^(-1/4) are selected (weights.h). */
typedef struct topkef_correction {
  const double *scales;           /* one a tensor, shard after shard; NULL: all are 1 */
  const void *const *velocities;  /* one a gradient; NULL: there are none */
  void *const *following;         /* one a gradient, become u'; must overlap nothing else */
  double momentum;
  int nesterov;                   /* 0 or 1 */
  const void *const *squares;     /* Adam's mean squares, one a gradient, or NULL; NULL: there are none */
} topkef_correction;

/* Write flags, values and indices to `payload`, and what is not sent to the candidates.
 *
 * residuals, candidates: a pointer for each tensor; candidates must overlap nothing else. gradients: as
 * many pointers as the recipe's tensors refer to. correction: NULL for none. keys: keys of random
 * numbers, three numbers for each tensor, shard after shard: two words, and the number of committed
 * steps; NULL if the kind of values draws none. */
TOPKEF_API void topkef_encode(topkef_bucket *bucket, const void *const *residuals,
                              const void *const *gradients, void *const *candidates,
                              uint8_t *payload, const topkef_correction *correction,
                              const int64_t *keys, int threads);

/* The same for shards of one bucket, which have the same tensors and gradients: in one pass over the
 * gradients, if possible.
 *
 * residuals, candidates: a pointer for each tensor, shard after shard. payloads: one for each shard. */
TOPKEF_API void topkef_encode_shards(topkef_bucket *const *shards, int64_t count,
                                     const void *const *residuals, const void *const *gradients,
                                     void *const *candidates, uint8_t *const *payloads,
                                     const topkef_correction *correction, const int64_t *keys,
                                     int threads);

/* Replace gradients by `scale` times the sum over `ranks` payloads, added in their order.
 *
 * flags: a byte for each tensor; if it is not 0 the gradient becomes NaN and the entries are not read.
 * Returns -1, or rank * tensors + tensor for the first indices that do not ascend or are outside
 * their tensor: then nothing has been written. */
TOPKEF_API int64_t topkef_decode(const topkef_bucket *bucket, const uint8_t *gathered,
                                 int64_t ranks, double scale, const uint8_t *flags,
                                 void *const *gradients, int threads);

/* out = residual + gradient, `count` elements; residual and out have 4 or 8 bytes, `dtype` is the
 * gradient's code in a recipe. Returns 1 if all of `out` are finite, else 0. */
TOPKEF_API int topkef_compensate(const void *residual, const void *gradient, void *out, int64_t count,
                                 int width, int dtype, int threads);

/* out[i] = values[index[i]], elements of 4 or 8 bytes. */
TOPKEF_API void topkef_take(const void *values, const int64_t *index, void *out, int64_t count, int width);

/* out[index[i]] -= values[i]; indices are unique, elements have 4 or 8 bytes. */
TOPKEF_API void topkef_subtract_at(void *out, const int64_t *index, const void *values, int64_t count,
                                   int width);

/* out[0..count) = 0, and out[index[i]] = values[i] for k unique indices; elements have 4 or 8 bytes. */
TOPKEF_API void topkef_place(const void *values, const int64_t *index, int64_t k, void *out,
                             int64_t count, int width, int threads);

/* Draw an index from each of k stretches of `numel` elements, of which number i begins at i * numel / k;
 * see `horovod_topk.ops.protocol.Ops.random_index`. key: two words, and the number of committed steps. */
TOPKEF_API void topkef_random_index(const int64_t *key, int64_t numel, int64_t k, int64_t *out);

/* The largest magnitude, the sum and the sum of squares of `count` elements of 4 or 8 bytes, made finite
 * as by `horovod_topk.ops.protocol.Ops.finite`, added in the order of `Ops.sums`. out: three numbers. */
TOPKEF_API void topkef_moments(const void *values, int64_t count, int width, int threads, double *out);

/* Encode `count` elements of 4 or 8 bytes, with magnitudes clipped to `limit`, as
 * `horovod_topk.methods.TernGrad` does. key: two words, and the number of committed steps. */
TOPKEF_API void topkef_pack_ternary(const void *values, int64_t count, int width, float limit, float scale,
                                    const int64_t *key, uint8_t *out, int threads);

/* out = factor * velocity + gradient, `count` elements of 4 or 8 bytes; `out` may be `velocity`. */
TOPKEF_API void topkef_update_velocity(const void *velocity, double factor, const void *gradient,
                                  void *out, int64_t count, int width, int threads);

/* The energy that error feedback takes away in samples of `count` tensors, elements of 4 or 8 bytes; see
 * `horovod_topk.ops.protocol.TrackerKernels.energy_withheld`. Gradients and arrivals are whole, residuals before and after are of
 * one shard. Arrivals are codes of 8 bits. scales: of the residuals before; null: all are 1. places: six numbers a tensor, its first
 * element in the residuals and in the arrivals, its number of elements, and the sample as in `Ops.blocks`.
 * out: a number a tensor for elements that arrive often, then one a tensor for the others. */
TOPKEF_API void topkef_lost(const void *const *gradients, const void *before, const double *scales,
                            const void *after, const uint8_t *arrivals, const int64_t *places, int64_t count,
                            int width, int threads, double *out);

/* Sums of squares of samples of `count` arrays, elements of 4 or 8 bytes. arrivals: as in `topkef_lost`; null: all
 * elements are of one class. places: as in `topkef_lost`. out: as in `topkef_lost`, or one number a tensor. */
TOPKEF_API void topkef_energies(const void *const *arrays, const uint8_t *arrivals, const int64_t *places,
                                int64_t count, int width, int threads, double *out);

/* The updates of horovod_topk/updates/formulas.py, whose names these are. */
#define TOPKEF_FADES 0.9740037464252967 /* 0.9^(1/4): of phi^(1/4) where nothing arrives */
#define TOPKEF_FADES_BY 851             /* 1 - 0.9^(1/4) in units of 2^-15: codes fall by as much, rounded */
#define TOPKEF_OFTEN 215                /* least code of phi > 1/2 */
#define TOPKEF_FREE 1048576.0

typedef struct {
  double momentum, rate, decay, nesterov, loss;
} topkef_sgd;

typedef struct {
  double beta1, beta2, again, now, decay, stays, rate, scale, eps, most, reach;
} topkef_adam;

typedef struct {
  const void *gradient;
  void *weight, *momentum;  /* SGD's buffer, or Adam's first moment */
  void *square, *largest;   /* Adam's second moment, and amsgrad's; null: none */
  uint8_t *arrivals;        /* codes of phi */
  const void *factors, *rms; /* Adam's: c of both classes, root mean square of the weights: arrays of the same dtype */
  int64_t count;
  double gain;              /* factor of the gradient: -1 to maximize */
  union {
    topkef_sgd sgd;
    topkef_adam adam;
  } numbers;
} topkef_update;

/* Update `count` tensors, elements of 4 or 8 bytes: one pass over each. Adam's have squares.
 *
 * from: weights, moments and arrivals before the step, which may not be written; null: `updates` has them. */
TOPKEF_API void topkef_update_all(const topkef_update *updates, const topkef_update *from, int64_t count,
                                  int width, int threads);

/* `horovod_topk.ops.protocol.Ops.pack_values` and `unpack_values` of one row: values of 4 or 8 bytes, kinds 2
 * to 4 of a recipe; `is_stable`: int8 is stable8. */
TOPKEF_API void topkef_pack_values(const void *values, int64_t count, int kind, int is_stable, uint8_t *out,
                                   int width, int threads);
TOPKEF_API void topkef_unpack_values(const uint8_t *data, int64_t count, int kind, void *out, int width,
                                     int threads);

/* `count` random numbers of 1 to 32 bits; see `horovod_topk.ops.protocol.Ops.random_bits`. key: as in
 * `topkef_random_index`. */
TOPKEF_API void topkef_random_bits(const int64_t *key, int64_t count, int bits, int64_t *out);

/* out = scale * left right, or out -= left right if `subtracts`: [m, k] times [k, n], elements of 4 or 8
 * bytes. Sums are in order of k, each product and sum rounded: the same bits on every processor. */
TOPKEF_API void topkef_product(const void *left, const void *right, int64_t m, int64_t k, int64_t n,
                               double scale, int subtracts, void *out, int width, int threads);

/* Make `count` rows of `length` elements orthonormal, in place, as horovod_topk/ops/orthonormal.py. */
TOPKEF_API void topkef_orthonormal(void *rows, int64_t count, int64_t length, int width);

#ifdef __cplusplus
}
#endif

#endif
