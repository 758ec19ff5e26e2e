/* The optimizers' updates of horovod_topk/updates/formulas.py: each array is read and written once.
 *
 * Everything is local to the file that includes it. */
#ifndef TOPKEF_UPDATES_H
#define TOPKEF_UPDATES_H

#include <stdint.h>

#include <cmath>

#include "topkef.h"

namespace {

/* The code of phi' after a step: `AFTER` of formulas.py. Where an element arrives that is, before the step
 * is rounded, 255 (0.9 phi + 0.1)^(1/4): this polynomial in phi^(1/2) rounds to the same code for all 256 codes. */
constexpr uint8_t code_after(int32_t code, bool arrives) {
  constexpr double later[] = {143.327, 4.497, 266.278, 310.287, -2248.376, 3945.033, -3105.924, 941.564};
  const double root = code / 255.0 * (code / 255.0);
  double exact = 0;
  for (int i = 7; i >= 0; --i) exact = exact * root + later[i];
  if (!arrives) exact = code * TOPKEF_FADES;
  const auto nearest = (int32_t)(exact + 0.5);
  const int32_t up = nearest > code + 1 ? nearest : code + 1;
  const int32_t down = nearest < code - 1 ? nearest : code - 1;
  return (uint8_t)(arrives ? (up < 255 ? up : 255) : (down > 0 ? down : 0));
}

struct After {
  alignas(16) uint8_t codes[2][256];  // of elements that do not arrive, and of those that do
};

constexpr After all_codes_after() {
  After found{};
  for (int code = 0; code < 256; ++code)
    for (int arrives = 0; arrives < 2; ++arrives) found.codes[arrives][code] = code_after(code, arrives);
  return found;
}

constexpr After AFTER = all_codes_after();

#ifndef TOPKEF_CODES
inline int64_t follow_lines(const float *, const uint8_t *, uint8_t *, uint8_t *, int64_t) { return 0; }
#endif
inline int64_t follow_lines(const double *, const uint8_t *, uint8_t *, uint8_t *, int64_t) { return 0; }

/* Replace the codes of n elements by those after the step, and keep those before it. */
template <class R>
inline void follow(const R *gradient, uint8_t *codes, uint8_t *before, int64_t n) {
  for (int64_t i = follow_lines(gradient, AFTER.codes[1], codes, before, n); i < n; ++i) {
    before[i] = codes[i];
    codes[i] = AFTER.codes[gradient[i] != 0][before[i]];
  }
}

constexpr int64_t GROUP = 1024;  // elements whose codes are computed at once: their gradients stay in the cache

template <class R, bool DECAYS, bool NESTEROV>
void update_sgd_as(const topkef_update &of, int64_t from, int64_t n) {
  auto gradient = static_cast<const R *>(of.gradient) + from;
  R *__restrict weight = static_cast<R *>(of.weight) + from;
  R *__restrict momentum = static_cast<R *>(of.momentum) + from;
  uint8_t *__restrict arrivals = of.arrivals + from;
  const topkef_sgd &sgd = of.numbers.sgd;
  const R mu = (R)sgd.momentum, lr = (R)sgd.rate, decay = (R)sgd.decay, loss = (R)sgd.loss;
  const R each = (R)(1.0 / (1.0 - sgd.momentum)), gain = (R)of.gain, unit = (R)(1.0 / 255);
  uint8_t before[GROUP];
  follow(gradient, arrivals, before, n);
  for (int64_t i = 0; i < n; ++i) {
    const R share = unit * (R)arrivals[i], phi = share * share * (share * share);
    R g = gain * gradient[i];
    if (DECAYS) g = g + decay * weight[i];
    const R total = mu * momentum[i] + ((R)1 - phi * loss) * g;
    R step = ((R)1 - share * mu) * each * total;
    if (NESTEROV) step = g + mu * step;
    weight[i] = weight[i] - lr * step;
    momentum[i] = share * total;
  }
}

template <class Update>
inline void in_groups(Update update, const topkef_update &of, int64_t from, int64_t n) {
  for (int64_t at = 0; at < n; at += GROUP) update(of, from + at, n - at < GROUP ? n - at : GROUP);
}

template <class R>
void update_sgd(const topkef_update &of, int64_t from, int64_t n) {
  const bool decays = of.numbers.sgd.decay != 0, nesterov = of.numbers.sgd.nesterov != 0;
  if (decays)
    in_groups(nesterov ? update_sgd_as<R, true, true> : update_sgd_as<R, true, false>, of, from, n);
  else
    in_groups(nesterov ? update_sgd_as<R, false, true> : update_sgd_as<R, false, false>, of, from, n);
}

template <class R, bool DECAYS, bool AMSGRAD>
void update_adam_as(const topkef_update &of, int64_t from, int64_t n) {
  auto gradient = static_cast<const R *>(of.gradient) + from;
  R *__restrict weight = static_cast<R *>(of.weight) + from;
  R *__restrict moment = static_cast<R *>(of.momentum) + from;
  R *__restrict square = static_cast<R *>(of.square) + from;
  R *__restrict largest = AMSGRAD ? static_cast<R *>(of.largest) + from : nullptr;
  uint8_t *__restrict arrivals = of.arrivals + from;
  auto factors = static_cast<const R *>(of.factors);
  const topkef_adam &adam = of.numbers.adam;
  const R rms = *static_cast<const R *>(of.rms), reach = rms * (R)adam.reach;
  const R far = reach < (R)1 ? (R)1 : reach < (R)TOPKEF_FREE ? reach : (R)TOPKEF_FREE;
  const R beta1 = (R)adam.beta1, again = (R)adam.again, now = (R)adam.now, decay = (R)adam.decay;
  const R fading = (R)adam.beta2, fresh = (R)(1.0 - adam.beta2), most = far * (R)adam.most, rate = (R)adam.rate;
  const R stays = (R)adam.stays, often = (adam.beta1 ? factors[0] : (R)1) * now, rarely = (adam.beta1 ? factors[1] : (R)1) * now;
  const R scale = (R)adam.scale, eps = (R)adam.eps, gain = (R)of.gain, unit = (R)(1.0 / 255);
  uint8_t before[GROUP];
  follow(gradient, arrivals, before, n);
  for (int64_t i = 0; i < n; ++i) {
    const R share = unit * (R)arrivals[i], b = share * share * beta1, c = before[i] >= TOPKEF_OFTEN ? often : rarely;
    R g = gain * gradient[i];
    if (DECAYS) g = g + decay * weight[i];
    const R v = square[i] * fading + g * g * fresh, norm = std::sqrt(v), limit = most * norm;
    R m = b * again * moment[i] + ((R)1 - b) * c * g;
    m = m > limit ? limit : m;
    m = m < -limit ? -limit : m;
    R by = norm;
    if (AMSGRAD) {
      largest[i] = largest[i] > v ? largest[i] : v;
      by = std::sqrt(largest[i]);
    }
    weight[i] = weight[i] * stays - m / (by * scale + eps) * rate;
    moment[i] = m;
    square[i] = v;
  }
}

template <class R>
void update_adam(const topkef_update &of, int64_t from, int64_t n) {
  const bool decays = of.numbers.adam.decay != 0, amsgrad = of.largest != nullptr;
  if (decays)
    in_groups(amsgrad ? update_adam_as<R, true, true> : update_adam_as<R, true, false>, of, from, n);
  else
    in_groups(amsgrad ? update_adam_as<R, false, true> : update_adam_as<R, false, false>, of, from, n);
}

}  // namespace

#endif
