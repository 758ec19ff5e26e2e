"""Local steps over Horovod, for training loops with tapes; `.keras.LocalSteps` is for `fit`.

An outer step runs eagerly, between training steps, so that no graph of the user's has a collective.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_topk.core.control.schedule import Clock
from horovod_topk.core.exchange.membership import elastic
from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.core.state.state_dict import LOCAL, VARIABLES, renamed, shared_out
from horovod_topk.errors import ConfigError, UnsupportedOperationError
from horovod_topk.local.state import LocalState, chosen
from horovod_topk.ops.tensorflow import Array, Buffer, TensorFlowOps
from horovod_topk.tensorflow.adapting import exchanges
from horovod_topk.tensorflow.background import BackgroundCollective
from horovod_topk.tensorflow.collective import HorovodCollective
from horovod_topk.tensorflow.compressor import Compressor
from horovod_topk.tensorflow.planning import names_of, shapes_of, spec_of, unwrap
from horovod_topk.tensorflow.state import CREATED
from horovod_topk.tensorflow.state_variables import Tensors

log = logging.getLogger("horovod_topk")

AVERAGED = "averaged "  # begins the names of variables that are averaged
UNUSED = (
    "LocalSteps was deleted before its first step: ranks train apart. Keep what LocalSteps(...) "
    "returns, and call its step() after each training step"
)


class VariableWeights:
    """`horovod_topk.local.rounds.Weights` of variables."""

    def __init__(self, variables: Mapping[str, Any], optimizer: Any) -> None:
        self._variables, self._optimizer = variables, optimizer

    def read(self, name: str) -> Array:
        """`Weights.read`."""
        v = self._variables[name]
        kept = tf.float64 if v.dtype == tf.float64 else tf.float32
        return Buffer(tf.cast(tf.reshape(v.read_value(), [-1]), kept))

    def moved(self, name: str, anchor: Array) -> Array:
        """`Weights.moved`: anchor and weights are both rounded to the weights' dtype."""
        rounded = tf.cast(tf.cast(anchor.value, self._variables[name].dtype), anchor.dtype)
        return Buffer(rounded - self.read(name).value)

    def blend(self, name: str, anchor: Array, alpha: float) -> None:
        """`Weights.blend`."""
        v, new = self._variables[name], anchor.value
        if alpha:
            new = self.read(name).value * alpha + new * (1.0 - alpha)
        v.assign(tf.reshape(tf.cast(new, v.dtype), v.shape))

    def is_exact(self, name: str) -> bool:
        """`Weights.is_exact`."""
        return self._variables[name].dtype in (tf.float32, tf.float64)

    def recover(self) -> None:
        """`Weights.recover`: the inner optimizer's variables that are not finite become zero."""
        own = getattr(self._optimizer, "variables", ())
        for v in map(unwrap, own() if callable(own) else own):
            if v.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(v))):
                log.warning("LocalSteps resets %s of the optimizer, which is not finite", v.name)
                v.assign(tf.zeros_like(v))


class EagerRunner(Tensors, StepRunner[Array]):
    """`StepRunner` over buffers, whose state dicts have tensors."""


class VariablesState(LocalState[Array]):
    """Error feedback and anchors of local steps, as `TopKEF.of(local)` returns it."""

    framework, runner = "tensorflow", EagerRunner
    broadcast = (
        "hvd.broadcast_variables([v.value for v in model.weights], root_rank=0) before LocalSteps "
        "is made (tf-keras: model.weights); in fit, put BroadcastGlobalVariablesCallback before it"
    )

    def __init__(self, variables: Mapping[str, Any], *settings: Any) -> None:
        super().__init__(f"LocalSteps of {len(variables)} variables", *settings)
        names = list(variables)
        self._known = {VARIABLES: names, "shapes": shapes_of(names, [*variables.values()])}
        self.created = next(CREATED)

    def state_dict(self) -> dict[str, Any]:
        """As `LocalState.state_dict`, with the names of all variables."""
        return super().state_dict() | {VARIABLES: [*self._known[VARIABLES]]}

    def load_state_dict(self, state: Mapping[str, Any], load: int = 0) -> None:
        """As `LocalState.load_state_dict`; a loaded model's variables may have other names."""
        super().load_state_dict(renamed(state, self._known))

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise StateDictError if a state dict does not fit."""
        own = {key: each for key, each in renamed(state, self._known).items() if key != LOCAL}
        parts = shared_out(own, [each.specs().keys() for each in self._states])
        for each, part in zip(self._states, parts, strict=True):
            each.check_state_dict(part)

    def resume(self, clock: Clock, ranks: int) -> None:
        """As `Attached.resume`: before the first step, anchors are the weights that ranks share."""
        super().resume(clock, ranks)
        if not (self.rounds.has_begun and self.rounds.steps):
            self.begin()

    def residual(self, name: str) -> Any:
        """As `Attached.residual`."""
        return super().residual(name).value

    def _fingerprint(self, array: Array) -> bytes:
        return hashlib.blake2b(array.value.numpy().tobytes(), digest_size=8).digest()


class LocalSteps:
    """Counts the steps in which ranks train alone, and exchanges how far they have moved.

    Call `step()` after each step of the optimizer, outside of tf.functions: every `every` steps it
    makes an outer step. Learning-rate schedules and the optimizer's iterations count inner steps.
    All ranks need equal weights when this object is made. Call `synchronize()` after the last
    step: ranks have equal weights then.

        local = LocalSteps(optimizer, model.trainable_variables, every=30, compression=TopKEF)
        for x, y in batches:
            train_step(x, y)  # with a tf.GradientTape, and no DistributedGradientTape
            local.step()
        local.synchronize()

    Args:
        optimizer: the inner optimizer, of any kind, and not distributed. Its state stays on each
            rank. None: the training loop updates variables by itself.
        variables: all that are trained.
        preset: "local_sgd", "diloco" or "sparseloco": published settings, which other arguments
            replace.
        compression: the compressor of movements, a class or an instance;
            `TopKEF(ratio=1 / 64, values="int2")` by default.
        averaged: further variables that are averaged at outer steps, such as the statistics of
            batch norm. Others stay each rank's own.
        offload: keep anchors, outer momentum and residuals in the host's memory, and encode there.
        process_set: Horovod's process set of the ranks that exchange.
        settings: see `horovod_topk.local.settings.LocalConfig`: every, outer, decay, fragments,
            delay, alpha, clip.

    Raises:
        ConfigError, UnknownSettingError: settings and optimizer cannot be combined.
        PlanMismatchError: ranks have different models or settings.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Iterable[Any],
        preset: str | None = None,
        *,
        compression: Any = None,
        averaged: Iterable[Any] = (),
        offload: bool = False,
        process_set: Any = hvd.global_process_set,
        **settings: Any,
    ) -> None:
        compressor, self._config = chosen(preset, compression, settings, Compressor)
        trained, beside = _named(variables), _named(averaged, AVERAGED)
        _check(optimizer, trained, process_set)
        self._device = "CPU:0" if offload else None
        with self._on_device():
            collective = None
            if process_set.size() > 1 or elastic():
                graphs = HorovodCollective(process_set, resizable=elastic())
                collective = BackgroundCollective(graphs)
            weights = VariableWeights(trained | beside, optimizer)
            settled = weights, compressor, self._config, TensorFlowOps(), collective
            self._topkef = VariablesState(trained, self._specs(trained), *settled)
            self._topkef.average(self._specs(beside))
            self._topkef._process_set = process_set
            self._topkef.begin()
            compressor.attached(self._topkef)
        self._unused = weakref.finalize(self, log.warning, UNUSED)
        self._unused.atexit = False
        rate = self._config.outer.effective_lr
        log.info("LocalSteps: %s, effective outer rate %.3g", self._config, rate)

    @property
    def rounds(self) -> int:
        """Outer steps so far, of each fragment; equal on all ranks."""
        return self._topkef.steps // self._config.fragments

    def begin(self) -> None:
        """Make the present weights the anchors, as when this object is made.

        Call it on every rank after weights were replaced, as by a pretrained model's.
        """
        with self._on_device():
            self._topkef.begin()

    def step(self) -> None:
        """Count a step of the inner optimizer, and make the outer steps that are due.

        Raises:
            PlanMismatchError: in the first call, if ranks had different weights before it.
            UnsupportedOperationError: it was called while a graph is traced.
        """
        if not tf.executing_eagerly():
            raise UnsupportedOperationError(
                "LocalSteps.step() was called in a tf.function, which calls it when it is traced",
                cure="Call it after the tf.function, once for each training step",
            )
        self._unused.detach()
        with self._on_device():
            self._topkef.check_equal()
            self._topkef.count()

    def synchronize(self) -> None:
        """Make an outer step of all that ranks have moved since, so that they have equal weights.

        A collective: call it on every rank, after as many rounds. Before evaluation it need not be
        called: any rank's weights can be evaluated.
        """
        with self._on_device():
            self._topkef.synchronize()

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Where an outer step is computed."""
        return tf.device(self._device) if self._device else contextlib.nullcontext()

    def _specs(self, variables: Mapping[str, Any]) -> list[TensorSpec]:
        """The specs of movements: in float32, or float64 for float64 variables."""
        specs = [spec_of(name, v, v) for name, v in variables.items()]
        device = None if self._device is None else "cpu"
        return [replace(s, dtype=s.residual_dtype, device=device or s.device) for s in specs]


def _named(variables: Iterable[Any], prefix: str = "") -> dict[str, Any]:
    """Variables of floats by unique names; each once."""
    found = {id(unwrap(v)): v for v in variables if unwrap(v).dtype.is_floating}
    names = names_of(found.values())
    return {prefix + n: unwrap(v) for n, v in zip(names, found.values(), strict=True)}


def _check(optimizer: Any, trained: Mapping[str, Any], process_set: Any) -> None:
    if not process_set.included():
        raise ConfigError(
            "this rank is not in the process set of LocalSteps",
            cure="Make LocalSteps on the ranks of the process set alone",
        )
    if exchanges(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} exchanges gradients in every step",
            cure="Pass the optimizer of one process, such as keras.optimizers.AdamW, and leave "
            "DistributedOptimizer, DistributedGradientTape and TopKEF(...).adapt out",
        )
    if not trained:
        raise ConfigError(
            "no variable of floats was given to LocalSteps",
            cure="Build the model first, and pass model.trainable_variables",
        )
