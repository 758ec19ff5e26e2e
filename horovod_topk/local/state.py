"""The state of local steps as adapters share it: fragments, their runners, counters of rounds."""

from __future__ import annotations

import logging
import re
import struct
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.exchange.agreement import agree, gather_bytes
from horovod_topk.core.exchange.loopback import Loopback
from horovod_topk.core.exchange.membership import check_elastic, elastic
from horovod_topk.core.exchange.protocol import Collective
from horovod_topk.core.exchange.selection import exchange_of
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.run.attached import Attached
from horovod_topk.core.run.base_compressor import BaseCompressor
from horovod_topk.core.run.optimizers import guarded
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.core.run.stats import describe
from horovod_topk.core.state.state_dict import LOCAL
from horovod_topk.errors import ConfigError, PlanMismatchError, StateDictError
from horovod_topk.local.outer import Rule, SenderCodec, Told, check_tells
from horovod_topk.local.rounds import Fragment, Rounds, Weights
from horovod_topk.local.settings import USUAL, LocalConfig, check_compression, defaults, preset_of
from horovod_topk.methods import METHODS, Method
from horovod_topk.ops import Ops

log = logging.getLogger("horovod_topk")

Array = TypeVar("Array")

STANDING = struct.Struct("<Q?")  # `Rounds.standing` of a fragment

_LIVE: weakref.WeakSet[LocalState[Any]] = weakref.WeakSet()


def chosen(
    preset: str | None,
    compression: Any,
    settings: Mapping[str, Any],
    compressors: type[BaseCompressor],
) -> tuple[Any, LocalConfig]:
    """The compressor and the settings that a user has asked for.

    preset: the name of published settings, which the others replace; None: there are none.
    compression: a compressor, its class, or None: the preset's, or `TopKEF` with `USUAL`.
    """
    module = f"horovod_topk.{compressors.adapter}"
    if preset is not None:
        published = preset_of(preset)
        settings = {**published.settings, **settings}
        if compression is None:
            compression = compressors.named(published.method, module)(**published.compression)
    if compression is None:
        compression = compressors.named("TopKEF", module)(**USUAL)
    compressor = compressors.asked(compression)
    if compressor is None:
        raise ConfigError(
            f"compression={compression!r:.60} is none of horovod_topk, or an environment variable "
            "has replaced it",
            cure="Pass Dense, Dense(values='bfloat16') or TopKEF",
        )
    return compressor, LocalConfig.of({**defaults(compressor.config.ratio, settings), **settings})


class LocalState(Attached[StepRunner[Array]], Generic[Array]):
    """Error feedback and anchors of local steps, as `TopKEF.of(...)` returns it.

    Steps of `stats()` and of `on_step` are outer steps; with fragments, each fragment's count.

    Args:
        specs: the tensors that are trained, in the order of the model.
        collective: of the ranks; None: this rank is alone.

    Raises:
        ConfigError: settings cannot be combined.
        PlanMismatchError: ranks have different models or settings.
    """

    name: str  # prefix of the collectives' names, equal on all ranks
    runner: ClassVar[type[StepRunner[Any]]] = StepRunner
    broadcast: ClassVar[str]  # how users of the adapter send rank 0's weights to all ranks

    def __init__(
        self,
        label: str,
        specs: Sequence[TensorSpec],
        weights: Weights[Array],
        compressor: BaseCompressor,
        config: LocalConfig,
        ops: Ops[Array],
        collective: Collective[Array] | None,
    ) -> None:
        super().__init__(None, "average", label)
        check_compression(compressor.config)
        check_elastic(compressor.config)
        if elastic() and config.fragments > 1:
            raise ConfigError(
                f"fragments={config.fragments} was given, and this job is elastic",
                cure="Leave fragments= out, or run without --min-np and --max-np",
            )
        self._ops, self._collective = ops, collective or Loopback(1, ops).collective(0)
        method = guarded(replace(compressor.config, follow_lr=False), compressor.deferred)
        taken = [own.name for own in _LIVE]
        made = [
            self._fragment(method, config, number, part, taken)
            for number, part in enumerate(fragments_of(specs, config.fragments))
        ]
        self.name = made[0].runner.name.removesuffix(".0")
        self._runners = [fragment.runner for fragment in made]
        self._state, self._weights = self._runners[0], weights
        self.rounds = Rounds(config, made, weights, ops)
        self.averages: Averages[Array] | None = None
        self._is_checked = False  # whether ranks are known to have equal anchors
        _LIVE.add(self)

    def _fragment(
        self,
        method: Method,
        config: LocalConfig,
        number: int,
        specs: Sequence[TensorSpec],
        taken: Sequence[str],
    ) -> Fragment[Array]:
        """Agree with all ranks on a fragment's plan, and allocate memory."""
        ops, collective = self._ops, self._collective
        plan = make_plan([*reversed(specs)], method)
        rule = Rule(config, number)
        plan = plan.under(plan.config, rule)
        prefix = method.name or f"local.{plan.digest.hex()}"
        ordinal = sum(each.startswith(f"{prefix}.") for each in taken)
        if not elastic():
            ordinal = agree(plan, ordinal, ops, collective)
        exchange, told = exchange_of(plan, ops, collective), Told(ops)
        check_tells(rule, exchange.kind)
        name, timer = f"{prefix}.{ordinal}.{number}", getattr(collective, "timer", None)
        codec, by_senders = PayloadCodec(ops), config.outer.mean == "senders"
        if by_senders:
            nodes = exchange.nodes if exchange.kind == "hierarchical" else None
            codec = SenderCodec(ops, nodes, by_steps=bool(config.seconds))
        runner = self.runner(plan, ops, codec, exchange, name, timer, told)
        if by_senders:  # what a residual adds to a mean does not depend on the number of ranks
            runner.residual_reduction = "sum"
        log.info("LocalSteps %s: %s, %s", name, plan.summary(), describe(exchange))
        return Fragment(runner, told)

    @property
    def residual_reduction(self) -> str:
        """`Attached.residual_reduction`."""
        return self._runners[0].residual_reduction

    @property
    def _states(self) -> Sequence[StepRunner[Array]]:
        return self._runners

    def average(self, specs: Sequence[TensorSpec]) -> None:
        """Register tensors that ranks average once a round, such as statistics of batch norm."""
        if specs:
            own = self._weights, self._ops, self._collective, self.name
            self.averages = Averages(specs, *own)

    def count(self) -> bool:
        """Count an inner step, make the outer steps that are due, and return whether any began."""
        started = self.rounds.after_step()
        if started and started[-1] is self.rounds.fragments[-1]:
            self._exchange_averages()
        return bool(started)

    def synchronize(self) -> None:
        """Give all ranks equal weights and averages. A collective: call it on every rank."""
        if self.rounds.has_begun:
            self.rounds.synchronize(self._moved())
            self._exchange_averages()

    def _moved(self) -> list[bool]:
        """Return for each fragment whether some rank has moved since its last exchange.

        A collective.
        """
        own = b"".join(STANDING.pack(*each) for each in self.rounds.standing())
        name = f"{self.name}.synchronize"
        said = gather_bytes(own, name, self._ops, self._collective, patient=True)
        by_rank = [[*STANDING.iter_unpack(each)] for each in said]
        started = [sum(count for count, _ in each) for each in by_rank]
        other = next((rank for rank, count in enumerate(started) if count != started[0]), None)
        if other is not None:
            raise PlanMismatchError(
                f"synchronize() was called on rank 0 after {started[0]} exchanges, on rank {other} "
                f"after {started[other]}",
                cure="Take equal numbers of steps on all ranks or, with every= in seconds, train "
                "until `rounds` has reached a number",
            )
        return [any(moved for _, moved in each) for each in zip(*by_rank, strict=True)]

    def _exchange_averages(self) -> None:
        if self.averages is not None:
            self.averages.exchange()

    def begin(self) -> None:
        """Make the present weights the anchors, before an inner step.

        An exchange under way, of other weights' movements, is dropped.
        """
        for runner in self._runners:
            runner.abandon()
        self.rounds.drop()
        self.rounds.begin()
        self._is_checked = elastic()

    def check_equal(self) -> None:
        """Compare the first anchors of all ranks, once. A collective."""
        if self._is_checked:
            return
        pairs = [(name, f) for f in self.rounds.fragments for name in f.names]
        own = [self._fingerprint(f.anchor(name)) for name, f in pairs]
        said = gather_bytes(b"".join(own), f"{self.name}.weights", self._ops, self._collective)
        for at, (name, _) in enumerate(pairs):
            width = len(own[at])
            found = [each[width * at : width * (at + 1)] for each in said]
            other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
            if other is not None:
                self.rounds.has_begun = False
                raise PlanMismatchError(
                    f"ranks 0 and {other} have different weights before the first step",
                    tensor=name,
                    cure=f"Send rank 0's weights to all ranks first, with {self.broadcast}",
                )
        self._is_checked = True

    def _fingerprint(self, array: Array) -> bytes:
        """Eight bytes that equal weights have in common. Waits for the device."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """As `Attached.state_dict`, with anchors, outer momentum and the counters of rounds.

        It waits for an exchange in the background. In the middle of a round the weights and the
        inner optimizer's state differ from rank to rank: save those of every rank, too.
        """
        self.rounds.settle()
        counters = {**self.rounds.counters(), "ranks": self._collective.size}
        return super().state_dict() | ({LOCAL: counters} if self.rounds.has_begun else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Attached.load_state_dict`.

        A state that another number of ranks has saved begins a round at its anchors, on every rank:
        what ranks had moved since their last outer step is lost.

        Raises:
            StateDictError: it does not fit; nothing has changed.
        """
        counters = state.get(LOCAL, {})
        known = len(counters.get("fragments", self.rounds.fragments))
        if known != len(self.rounds.fragments):
            raise StateDictError(
                f"the state dict has {known} fragments, and LocalSteps has "
                f"{len(self.rounds.fragments)}",
                cure=f"Pass fragments={known}",
            )
        super().load_state_dict({key: each for key, each in state.items() if key != LOCAL})
        self.rounds.drop()
        self.rounds.has_begun = self._is_checked = bool(counters)
        if counters:
            self.rounds.take(counters)
        if counters and counters["ranks"] != self._collective.size:
            self.rounds.restart()

    def shared_state(self) -> dict[str, Any]:
        """As `Attached.shared_state`, with the counters of rounds."""
        counters = {LOCAL: self.rounds.counters()} if self.rounds.has_begun else {}
        return super().shared_state() | counters

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """As `Attached.take_shared`."""
        super().take_shared({key: each for key, each in state.items() if key != LOCAL})
        if LOCAL in state:
            self.rounds.take(state[LOCAL])
        self.rounds.drop()  # the weights are another rank's

    def reset(self) -> None:
        """As `Attached.reset`: residuals become zero; anchors and outer momentum stay."""
        super().reset()
        self.rounds.drop()

    def forget(self) -> None:
        """As `Attached.forget`."""
        super().forget()
        self.rounds.drop()
        self.rounds.has_begun = False


class Averages(Generic[Array]):
    """Averages tensors over ranks, uncompressed, such as the statistics of batch norm.

    The mean is computed in float64, so that it leaves a constant as it is.

    Attributes:
        runner: its steps are rounds.
    """

    _means: dict[int, list[Array]]  # the last means by bucket; at first this rank's values

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        weights: Weights[Array],
        ops: Ops[Array],
        collective: Collective[Array],
        name: str,
    ) -> None:
        self._weights, self._ops = weights, ops
        plan = make_plan([replace(s, dtype="float64") for s in specs], METHODS["Dense"]())
        if not elastic():
            agree(plan, 0, ops, collective)
        exchange = exchange_of(plan, ops, collective)
        self.runner = StepRunner(plan, ops, PayloadCodec(ops), exchange, f"{name}.averages")
        self._means = self._values()

    def exchange(self) -> None:
        """Replace the values of all ranks by their mean; by the last one, if one is not finite."""
        found = self._values()
        for ordinal, values in found.items():
            self.runner.launch(ordinal, values)
        self.runner.step.finish(found)
        if self.runner.commit():
            self._means = found
        for bucket in self.runner.plan.buckets:
            for tensor, mean in zip(bucket.gradients, self._means[bucket.ordinal], strict=True):
                self._weights.blend(tensor.spec.name, mean, 0.0)

    def _values(self) -> dict[int, list[Array]]:
        """Copies of this rank's values by bucket."""
        read, cast = self._weights.read, self._ops.cast
        return {
            bucket.ordinal: [cast(read(t.spec.name), "float64") for t in bucket.gradients]
            for bucket in self.runner.plan.buckets
        }


def fragments_of(specs: Sequence[TensorSpec], count: int) -> list[list[TensorSpec]]:
    """Split a model into fragments of about equal size, block by block in strides.

    A block is the tensors whose names begin alike up to their first number, such as "layers.3". In
    Keras it is a layer, such as "dense_3/kernel" and "dense_3/bias".
    """
    blocks: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        found = re.match(r"(.*?\.)?\d+(?=\.|$)", spec.name)
        layer = spec.name.rpartition("/")[0] or spec.name.partition(".")[0]
        blocks.setdefault(found[0] if found else layer, []).append(spec)
    if count > len(blocks):
        raise ConfigError(
            f"fragments={count} was given, and the model has {len(blocks)} blocks",
            cure=f"Pass fragments={len(blocks)} at most",
        )
    parts: list[list[TensorSpec]] = [[] for _ in range(count)]
    sizes = [0] * count
    for block in blocks.values():
        least = min(range(count), key=lambda p: (sizes[p], p))
        parts[least] += block
        sizes[least] += max(1, sum(spec.numel for spec in block))
    return parts
