"""Updates of Keras' optimizers on compressed gradients.

Those of SGD, Adam and AdamW take the place of `update_step` and its like (`updates.tensorflow`).
Other optimizers make their own step, which is corrected (`tensorflow.own_steps`). What Keras does
around these stays: clipping, weight decay, averages of weights, loss scales and accumulation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from horovod_topk.core.run.optimizers import kind_of, warn_of_unknown
from horovod_topk.errors import ConfigError
from horovod_topk.tensorflow.gradients import is_sparse
from horovod_topk.tensorflow.learning_rates import rate_of
from horovod_topk.tensorflow.own_steps import OwnStep
from horovod_topk.tensorflow.planning import names_of, unwrap
from horovod_topk.tensorflow.state import OptimizerState
from horovod_topk.updates import tracker
from horovod_topk.updates.formulas import UNKNOWN, Family
from horovod_topk.updates.tensorflow import StepNumbers, update, wide
from horovod_topk.updates.tracker import Rule

Pairs = Sequence[tuple[Any, Any]]  # gradients and their variables


@dataclass
class Updates:
    """Updates of one optimizer of Keras 3 or tf-keras, legacy or not."""

    rule: Rule
    beta2: float = 0.0  # Adam's
    family: Family = UNKNOWN  # of an optimizer with a step of its own
    is_on: bool = field(default=True, compare=False)  # False: variables are too narrow for it
    _states: weakref.WeakValueDictionary[int, OptimizerState] = field(
        default_factory=weakref.WeakValueDictionary, compare=False, repr=False
    )  # state of the exchange of each variable, by its id

    def leave_narrow(self, optimizer: Any, variables: Iterable[Any]) -> list[str]:
        """Leave updates as they are if a variable is narrower than float32."""
        for inner in map(unwrap, variables) if self.is_on else ():
            if inner.dtype not in (tf.float32, tf.float64):
                self.is_on, kind = False, kind_of(optimizer)
                self._states.clear()
                why = f"variable {inner.name!r} is {inner.dtype.name}"
                return [warn_of_unknown(kind, why)]
        return []

    def adapt(self, state: OptimizerState, variables: Iterable[Any]) -> None:
        """Note the state of these variables' exchange."""
        for variable in variables if self.is_on else ():
            self._states[id(unwrap(variable))] = state

    def moments(self, optimizer: Any, variables: Iterable[Any]) -> tuple[float, list[Any]]:
        """Return Adam's beta 2, and its mean square of each variable or None.

        For other optimizers the list is empty.
        """
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if not self.is_on or self.rule != tracker.ADAM:
            return 0.0, []
        return self.beta2, [_square_of(optimizer, variable) for variable in variables]

    def apply(self, optimizer: Any, pairs: Pairs) -> list[tuple[Any, Any]]:
        """Update the variables whose exchange is followed, by the rule of SGD or Adam.

        Returns:
            The pairs of other variables, which the optimizer updates by itself.
        """
        if self.rule.is_own:
            return list(pairs)
        found: dict[tuple[OptimizerState, Any], list[tuple[Any, Any]]] = {}
        rest = list[tuple[Any, Any]]()
        for gradient, variable in pairs:
            inner = unwrap(variable)
            state = self._state_of(gradient, inner)
            if state is None:
                rest.append((gradient, variable))
            else:
                pair = tf.cast(gradient, inner.dtype), variable
                found.setdefault((state, inner.dtype), []).append(pair)
        numbers = _numbers_of(optimizer) if found else None
        for (state, _), own in found.items():
            assert numbers is not None
            slots = [list(map(unwrap, slots_of(optimizer, variable))) for _, variable in own]
            variables = [unwrap(variable) for _, variable in own]
            gradients, known = [gradient for gradient, _ in own], state.update_inputs(variables)
            update(gradients, variables, slots, numbers, known)
        return rest

    def around(
        self, optimizer: Any, gradient: Any, variable: Any, step: Callable[[Any], Any]
    ) -> Any:
        """Have an optimizer make its own step for one variable, and correct what it has changed.

        step: makes it with a gradient.
        """
        inner = unwrap(variable)
        state = self._state_of(gradient, inner) if self.rule.is_own else None
        if state is None:
            return step(gradient)
        gradient = tf.cast(gradient, inner.dtype)
        own = OwnStep(gradient, inner, state.update_inputs([inner]), self.family)
        asks = self.family.has_mean or (self.family.is_sign and hasattr(optimizer, "beta_1"))
        if asks and (mean := _mean_of(optimizer, variable)) is not None:
            beta1 = wide(_number(optimizer, "beta_1"))
            if self.family.has_mean:
                own.move(mean, 1.0 - beta1 ** wide(tf.convert_to_tensor(optimizer.iterations)))
            else:
                own.compare(mean, beta1)
        result = step(gradient)
        own.correct(rate_of(optimizer))
        return result

    def _state_of(self, gradient: Any, variable: Any) -> OptimizerState | None:
        """The state of a variable's exchange; None: the optimizer updates it by itself."""
        state = self._states.get(id(variable))
        if state is None or is_sparse(gradient) or not state.is_adapted(variable):
            return None
        return state


class _Floored:
    """Mixin for Keras 3's Adafactor whose mean square is never below the smallest normal number.

    Adafactor divides by the root of (row mean x column mean / mean) of g^2 + 1e-30. Where a row and
    a column have no gradient, that is 0 in float32, and 0 / 0 a NaN, which its clipping by the root
    mean square then writes to the whole matrix. PyTorch's Adafactor has a floor of its own.
    """

    def assign(self, variable: Any, value: Any) -> None:
        """As the base class, with a floor for mean squares."""
        this: Any = self
        base: Any = super()
        if any(variable is each for each in this._v):
            smallest = 2.0**-14 if variable.dtype == "float16" else 2.0**-126
            value = tf.maximum(value, smallest)
        base.assign(variable, value)


class _Adapted:
    """Mixin for a Keras 3 optimizer whose updates depend on how often elements arrive."""

    _topkef_updates: Updates

    def _check_variables_are_known(self, variables: Any) -> None:
        """As the base class, with the cure: a tape may have built it for the first ones it saw."""
        base: Any = super()
        for variable in variables:
            try:
                base._check_variables_are_known([variable])
            except ValueError as error:
                raise ConfigError(
                    f"{kind_of(self)} was built without this variable: before, or for the first "
                    "gradients that a tape exchanged in a tf.function",
                    tensor=names_of([variable])[0],
                    cure="Call optimizer.build(variables), with all that it updates, before the "
                    "first step",
                ) from error

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        base: Any = super()
        rest = self._topkef_updates.apply(self, list(zip(grads, trainable_variables, strict=True)))
        if rest:
            base._backend_update_step(*map(list, zip(*rest, strict=True)), learning_rate)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> Any:
        """As the base class; see `Updates.around`."""
        base: Any = super()
        return self._topkef_updates.around(
            self, gradient, variable, lambda each: base.update_step(each, variable, learning_rate)
        )


def own_class(optimizer: Any, updates: Updates | None) -> Any:
    """The class of a Keras 3 optimizer, or a subclass whose updates fit compressed gradients."""
    base = type(optimizer)
    members: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
    is_adafactor = any(each.__name__ == "Adafactor" for each in base.__mro__)
    bases = (_Floored, base) if is_adafactor else (base,)
    if updates is not None:
        return type(base.__name__, (_Adapted, *bases), members | {"_topkef_updates": updates})
    return type(base.__name__, bases, members) if is_adafactor else base


def is_keras_3(optimizer: Any) -> bool:
    """Whether an optimizer is one of Keras 3."""
    return any(base.__module__.partition(".")[0] == "keras" for base in type(optimizer).__mro__)


def update_tf_keras(optimizer: Any, updates: Updates) -> None:
    """Have a tf-keras optimizer update followed variables by `updates`."""
    legacy = is_legacy(optimizer)
    name = "_distributed_apply" if legacy else "_distributed_apply_gradients_fn"
    own, done = getattr(optimizer, name), set[int]()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(distribution: Any, grads_and_vars: Any, *rest: Any, **more: Any) -> Any:
        pairs = list(grads_and_vars)
        left = {id(variable) for _, variable in updates.apply(optimizer, pairs)}
        done.update({id(variable) for _, variable in pairs} - left)
        try:
            return own(distribution, pairs, *rest, **more)
        finally:
            done.clear()

    def skipping(step: Callable[..., Any]) -> Callable[..., Any]:
        def unless_done(gradient: Any, variable: Any, *rest: Any, **more: Any) -> Any:
            if id(variable) in done:
                return tf.no_op()
            return updates.around(
                optimizer, gradient, variable, lambda each: step(each, variable, *rest, **more)
            )

        return unless_done

    setattr(optimizer, name, apply)
    for each in ["_resource_apply_dense"] if legacy else ["_update_step", "_update_step_xla"]:
        setattr(optimizer, each, skipping(getattr(optimizer, each)))


def is_legacy(optimizer: Any) -> bool:
    """Whether an optimizer is one of `tf_keras.optimizers.legacy`."""
    return hasattr(optimizer, "_hyper")


def is_sgd(optimizer: Any) -> bool:
    """Whether an optimizer is SGD. Otherwise it is Adam or AdamW."""
    return not (hasattr(optimizer, "beta_1") or "beta_1" in getattr(optimizer, "_hyper", ()))


def slots_of(optimizer: Any, variable: Any) -> list[Any]:
    """The tf.Variables of an optimizer for one variable: SGD's momentum, or Adam's moments."""
    sgd, amsgrad = is_sgd(optimizer), getattr(optimizer, "amsgrad", False)
    if is_legacy(optimizer):
        kinds = ["momentum"] if sgd else ["m", "v", "vhat"][: 2 + amsgrad]
        return [optimizer.get_slot(variable, kind) for kind in kinds]
    kinds = ["_momentums", "_velocities", "_velocity_hats"][: 2 + amsgrad]
    lists = [optimizer.momentums] if sgd else [getattr(optimizer, kind) for kind in kinds]
    at = _index_of(optimizer, variable)
    return [slots[at] for slots in lists]


def _index_of(optimizer: Any, variable: Any) -> int:
    """Position of a variable's slots in the lists of an optimizer that is not legacy."""
    if hasattr(optimizer, "_index_dict"):  # tf-keras
        return optimizer._index_dict[optimizer._var_key(variable)]  # type: ignore[no-any-return]
    return optimizer._get_variable_index(variable)  # type: ignore[no-any-return]


def _mean_of(optimizer: Any, variable: Any) -> Any:
    """The tf.Variable of an optimizer's mean of gradients for a variable; None: none is known."""
    if is_sgd(optimizer):  # without beta_1
        return None
    if is_legacy(optimizer):
        has = "m" in optimizer.get_slot_names()
        return optimizer.get_slot(variable, "m") if has else None
    means = getattr(optimizer, "_momentums", None) or getattr(optimizer, "_m", None)
    return unwrap(means[_index_of(optimizer, variable)]) if means else None


def _square_of(optimizer: Any, variable: Any) -> Any:
    """Adam's mean square of a variable; None: there is none yet."""
    known = optimizer._slots if is_legacy(optimizer) else getattr(optimizer, "_velocities", None)
    if not known:
        return None
    try:
        slot = slots_of(optimizer, variable)[1]
    except KeyError:  # a variable that the optimizer does not know yet
        return None
    return None if slot is None else tf.convert_to_tensor(unwrap(slot))


def _numbers_of(optimizer: Any) -> StepNumbers:
    """The numbers of an optimizer's next update."""
    rate = rate_of(optimizer)
    if is_sgd(optimizer):
        momentum = wide(_number(optimizer, "momentum"))
        return StepNumbers.of_sgd(momentum, rate, nesterov=bool(optimizer.nesterov))
    betas = wide(_number(optimizer, "beta_1")), wide(_number(optimizer, "beta_2"))
    step = wide(tf.convert_to_tensor(optimizer.iterations)) + 1.0
    return StepNumbers.of_adam(betas, step, rate, optimizer.epsilon)


def _number(optimizer: Any, name: str) -> Any:
    """A setting of an optimizer: a number, or a variable of a legacy one."""
    return optimizer._get_hyper(name) if is_legacy(optimizer) else getattr(optimizer, name)
