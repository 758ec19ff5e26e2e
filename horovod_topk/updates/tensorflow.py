"""Updates of Keras' SGD, Adam and AdamW on compressed gradients: one operation for all variables.

`horovod_topk.updates.formulas` states them. Slots keep Keras' meaning, so that dense training can
go on from them:

    SGD    m = -lr B: the formulas hold for m, with -lr G in place of G and -1 in place of lr
    Adam   eps is added to sqrt(v), and so eps / sqrt(z_t) to sqrt(v / z_t)

Without the kernel, as on GPUs, operations of TensorFlow compute each variable's update.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import tensorflow as tf

from horovod_topk.ops import coding
from horovod_topk.ops.tensorflow import Buffer, TensorFlowOps, find_operations, threads
from horovod_topk.updates import formulas
from horovod_topk.updates.formulas import Adam, Sgd
from horovod_topk.updates.tracker import whole_sample


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of one update of an optimizer, in float64."""

    gain: Any  # factor of gradients
    of: Sgd | Adam  # without SGD's loss, which each tensor has

    @classmethod
    def of_sgd(cls, momentum: Any, rate: Any, *, nesterov: bool) -> StepNumbers:
        """Numbers of Keras' SGD."""
        return cls(-rate, Sgd(momentum, -1.0, 0.0, nesterov, cut=0.0))

    @classmethod
    def of_adam(cls, betas: tuple[Any, Any], step: Any, rate: Any, eps: float) -> StepNumbers:
        """Numbers of Keras' Adam in step t; all but eps are [] float64."""
        of = formulas.adam_of(betas, step, rate, (0.0, 0.0), eps, VERBS)
        return cls(1.0, replace(of, eps=of.eps * of.scale))

    @property
    def stacked(self) -> Any:
        """All of them in one tensor, the factor of gradients first."""
        return tf.stack([wide(each) for each in (self.gain, *vars(self.of).values())])


class Codes:
    """What an update does to codes."""

    FOLLOW = 0
    STAY = 1  # the step was not committed
    FILL = 2  # all elements arrive


class VariableStretch(Protocol):
    """A stretch of a flat tf.Variable, of one tensor's elements."""

    @property
    def variable(self) -> Any:
        """The variable."""

    @property
    def start(self) -> int:
        """Its first element."""

    def value(self) -> Any:
        """Read it."""

    def assign(self, value: Any) -> None:
        """Replace it."""


@dataclass(frozen=True)
class UpdateInputs:
    """What the update of some tensors needs of the last step's exchange."""

    codes: Sequence[
        VariableStretch
    ]  # of tf.Variables of uint8: phi of elements, which the update writes
    damping: Any  # Adam's c of both classes, [n, 2]; None: with SGD
    cuts: Any  # SGD's loss of elements that always arrive, [n] float64; None: with Adam
    does: Any  # one of `Codes`, [] int32
    squares: Sequence[VariableStretch] = ()  # v of an optimizer with a step of its own, written too

    def at(self, position: int) -> UpdateInputs:
        """The same for one of the tensors."""
        one = slice(position, position + 1)
        damping, cuts = (None if x is None else x[one] for x in (self.damping, self.cuts))
        return UpdateInputs(self.codes[one], damping, cuts, self.does)


def update(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    slots: Sequence[Sequence[Any]],
    numbers: StepNumbers,
    known: UpdateInputs,
) -> None:
    """Update variables of one dtype, their slots and their codes.

    Args:
        gradients: of the variables' dtype.
        variables: tf.Variables.
        slots: the optimizer's of each variable: SGD's momentum, or Adam's two or three moments.
        numbers: those of the update.
        known: what the update needs of the exchange.
    """
    operations = find_operations()
    on_cpu = not any("GPU" in variable.device for variable in variables)
    if not (on_cpu and hasattr(operations, "topkef_update")):
        for at, each in enumerate(zip(gradients, variables, slots, strict=True)):
            _update_one(*each, numbers, known.at(at))
        return
    dtype, moments = variables[0].dtype, [slot for own in slots for slot in own]
    damping = [] if known.damping is None else tf.reshape(known.damping, [-1])
    samples = [whole_sample(variable.shape.num_elements()) for variable in variables]
    arrays = list({id(code.variable): code.variable for code in known.codes}.values())
    position = {id(array): at for at, array in enumerate(arrays)}
    written = [variables, moments, arrays]
    after = operations.topkef_update(
        gradients,
        *([value_of(each) for each in some] for some in written),
        numbers=numbers.stacked,
        losses=tf.zeros([0], tf.float64) if known.cuts is None else known.cuts,
        factors=tf.cast(damping, dtype),
        does=known.does,
        samples=[
            number
            for each, code in zip(samples, known.codes, strict=True)
            for number in (0, code.start, each.numel, *each.pick)
        ],
        arrays=[position[id(code.variable)] for code in known.codes],
        threads=threads(),
    )
    for some, values in zip(written, after, strict=True):
        for variable, value in zip(some, values, strict=True):
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def _update_one(
    gradient: Any,
    variable: Any,
    slots: Sequence[Any],
    numbers: StepNumbers,
    known: UpdateInputs,
) -> None:
    """Update one variable by TensorFlow's operations."""
    written, (codes,) = [variable, *slots], known.codes
    nesterov = isinstance(numbers.of, Sgd) and numbers.of.nesterov
    own = known.cuts if known.damping is None else known.damping
    function = _traced(tuple(variable.shape), variable.dtype, len(slots), nesterov)
    before = [*map(value_of, written), codes.value()]
    *after, arrivals = function(gradient, before, numbers.stacked, own, known.does)
    for each, value in zip(written, after, strict=True):
        each.assign(value, read_value=False)
    codes.assign(arrivals)


@functools.cache
def _traced(shape: tuple[int, ...], dtype: Any, moments: int, nesterov: bool) -> Any:
    """Return a function whose graph all variables of a shape and dtype share.

    Keras traces a training step twice, and building the graph takes longer than a step.
    """
    return tf.function(functools.partial(_after, nesterov), autograph=False)


def _after(
    nesterov: bool, gradient: Any, before: Sequence[Any], numbers: Any, own: Any, does: Any
) -> list[Any]:
    """Compute a variable, its moments and its codes after an update.

    Args:
        nesterov: whether SGD's momentum is Nesterov's.
        gradient: G.
        before: the variable, its moments and its codes.
        numbers: the gradient's factor and those of the update, float64.
        own: SGD's loss [1], or Adam's damping [1, 2].
        does: what happens to codes, [] int32.
    """
    weight, *moments, codes = before
    gain, *each = tf.unstack(tf.cast(numbers, weight.dtype))
    if len(moments) == 1:  # of dense steps, where nothing has ever arrived
        is_dense = tf.reduce_all(tf.equal(codes, 0)) & tf.reduce_any(tf.not_equal(moments[0], 0))
        codes = tf.where(is_dense, tf.constant(coding.ALWAYS, tf.uint8), codes)
    codes, later = codes_around(codes, gradient, does)
    share = tf.reshape(formulas.share(tf.cast(later, weight.dtype)), weight.shape)
    if len(moments) == 1:
        of_sgd = Sgd(each[0], each[1], each[2], nesterov, tf.cast(own[0], weight.dtype))
        after: Sequence[Any] = formulas.sgd(weight, moments[0], gradient * gain, share, of_sgd)
    else:
        often = tf.reshape(formulas.arrives_often(codes), weight.shape)
        damping = tf.cast(own[0], weight.dtype)
        factor, rms = tf.where(often, damping[0], damping[1]), rms_of(weight)
        kept, of = (moments[0], moments[1], moments[2] if moments[2:] else None), Adam(*each)
        factor = tf.where(tf.equal(of.beta1, 0), tf.ones_like(factor), factor)
        after = formulas.adam(weight, kept, gradient, share, factor, rms, of, VERBS)
    does_follow = tf.equal(does, Codes.FOLLOW)
    return [*after[: 1 + len(moments)], tf.where(does_follow, later, codes)]


def codes_around(codes: Any, gradient: Any, does: Any) -> tuple[Any, Any]:
    """Codes before and after a step, as if it was committed; does: one of `Codes`, [] int32."""
    filled = tf.fill(codes.shape, tf.constant(coding.ALWAYS, tf.uint8))
    codes = tf.where(tf.equal(does, Codes.FILL), filled, codes)
    table, position = tf.constant(formulas.AFTER, tf.uint8), tf.cast(codes, tf.int32)
    arrives = tf.reshape(tf.not_equal(gradient, 0), [-1])
    return codes, tf.where(arrives, tf.gather(table[1], position), tf.gather(table[0], position))


def rms_of(weight: Any) -> Any:
    """Root mean square of a sample of a variable's elements."""
    sample = whole_sample(weight.shape.num_elements())
    sums = TensorFlowOps().energies_of([Buffer(weight)], None, (sample.whole,), weight.dtype.name)
    return tf.sqrt(sums.value[0] / sample.size)


def value_of(variable: Any) -> Any:
    """A variable's value, without a cast by an automatic mixed precision."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def wide(number: Any) -> Any:
    """Convert a number or a scalar to float64; a number by way of no other dtype."""
    if isinstance(number, int | float):
        return tf.constant(number, tf.float64)
    return tf.cast(number, tf.float64)


def _where(is_so: Any, one: Any, other: Any) -> Any:
    """Choose between two numbers or tensors, one of which is a tensor."""
    dtype = (one if tf.is_tensor(one) else other).dtype
    both = (each if tf.is_tensor(each) else tf.constant(each, dtype) for each in (one, other))
    return tf.where(is_so, *both)


class _Verbs:
    """`horovod_topk.updates.formulas.Verbs`."""

    root = staticmethod(tf.sqrt)
    where: Any = staticmethod(_where)


VERBS = _Verbs()
