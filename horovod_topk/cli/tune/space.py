"""The settings that `horovod-topk tune` tries, with their bytes and predicted step times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from horovod_topk.cli.options import optimizer_of, update_rule_of
from horovod_topk.config import fields_of
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.run.optimizers import HAS_NONE, fitted
from horovod_topk.cost import strategies
from horovod_topk.cost.machine import Machine
from horovod_topk.cost.step import Training, local_step, step
from horovod_topk.cost.strategies import Multiples, Strategy
from horovod_topk.cost.traffic import cheapest
from horovod_topk.local.call import LocalCall, parse
from horovod_topk.methods import METHODS, Method
from horovod_topk.methods.topk import TopK
from horovod_topk.updates.tracker import Rule

# By method, the values of each of its settings; docs/choosing.md and docs/methods.md say why these.
# Values coarser than int4 are not tried: `plan` does not recommend them either.
AXES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "TopKEF": {
        "ratio": (0.0025, 0.005, 0.01, 0.02, 0.05, 0.1),
        "values": ("int4", "int8"),
        "exchange": ("allgather", "sharded"),
        "every": (1, 10, 30),  # steps from one exchange to the next
    },
    "PowerSGD": {"rank": (1, 2, 4, 8)},
    "QSGD": {"bits": (2, 4, 8)},
    "Dense": {},
}
USUAL: Mapping[str, Any] = {  # of TopKEF
    name: getattr(TopK(), name) for name in ("ratio", "values", "exchange")
}
FIXED = {"QSGD": {"exchange": "sharded"}, "Dense": {"values": "bfloat16"}}

Fit = Callable[[Method, Mapping[str, str]], tuple[Method, Rule | None]]


@dataclass(frozen=True)
class Setting:
    """A point of the space: a method, and a value of each of its axes."""

    method: str
    values: tuple[tuple[str, Any], ...]

    @cached_property
    def text(self) -> str:
        """The setting as `compare` writes it."""
        every, call = self.every, self.call
        return call if every == 1 else f"LocalSteps({call}, every={every})"

    @property
    def every(self) -> int:
        """Steps from one exchange to the next."""
        return int(dict(self.values).get("every", 1))

    @property
    def call(self) -> str:
        """The compressor, in Python."""
        found = {**dict(self.values), **FIXED.get(self.method, {})}
        found.pop("every", None)
        if self.method == "TopKEF":
            told = {"exchange"} if self.every > 1 else USUAL  # local steps have other defaults
            found = {k: v for k, v in found.items() if k not in told or v != USUAL[k]}
            found |= {"momentum": 0} if self.every > 1 else {}
        return f"{self.method}({', '.join(f'{key}={value!r}' for key, value in found.items())})"

    @property
    def title(self) -> str:
        """The setting in a few words."""
        found = dict(self.values)
        parts = [self.method]
        parts += [f"{key} {found[key]}" for key in ("rank", "bits") if key in found]
        parts += [str(found[key]) for key in ("ratio", "values") if key in found]
        parts += ["sharded"] * (found.get("exchange") == "sharded")
        parts += [f"every {self.every}"] * (self.every > 1)
        return " ".join(parts)


DEFAULT = Setting("TopKEF", (*USUAL.items(), ("every", 1)))


def settings(*, local: bool) -> Iterator[Setting]:
    """Yield all settings. local: whether ranks can take local steps."""
    for method, axes in AXES.items():
        for values in itertools.product(*axes.values()):
            found = Setting(method, tuple(zip(axes, values, strict=True)))
            if local or found.every == 1:
                yield found


@dataclass(frozen=True)
class Cost:
    """Bytes and seconds of a step with a setting."""

    bytes: float  # that a rank sends, or that leave a node; mean over the run
    later: float  # the same after the first steps, in which TopKEF sends more
    seconds: float | None = None  # predicted by `plan`; None: the network is not described


class Costs:
    """Costs of settings, by the formulas of `bytes` and `plan`."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        nodes: Nodes,
        steps: int,
        fit: Fit,
        machine: Machine | None = None,
        training: Training | None = None,
        multiples: Callable[[Method], Multiples] | None = None,
    ) -> None:
        self._specs, self._nodes, self._steps, self._fit = specs, nodes, steps, fit
        self._machine, self._training, self._multiples = machine, training, multiples

    @cached_property
    def dense(self) -> Cost:
        """The cost of Horovod's own allreduce of float32."""
        found = strategies.dense(self._specs, self._nodes)
        sent = float(found.node_bytes or found.sent_bytes)
        return Cost(sent, sent, self._seconds(found))

    def of(self, text: str) -> Cost:
        """Return the cost of a compressor, or of local steps."""
        asked = parse(text)
        is_local = isinstance(asked, LocalCall)
        call = asked.compressor if isinstance(asked, LocalCall) else asked
        every = asked.config.steps if isinstance(asked, LocalCall) else 1
        method, rule = METHODS[call.name], None
        given, deferred = fields_of(method, {**method.for_training, **call.settings}, call.name)
        config = method(**given)
        if not is_local:
            config, rule = self._fit(config, deferred)
        plan = make_plan(self._specs, config, update_rule=rule)
        later = self._sent(plan)
        total, at = 0.0, 0
        levels: Any = config.warmup or ()
        for until, ratio in levels:
            until = min(until, self._steps)
            total += (until - at) * self._sent(plan.under(config.at(ratio), rule))
            at = until
        mean = (total + (self._steps - at) * later) / self._steps
        seconds = self._seconds_of(call.name, config, rule, every)
        return Cost(mean / every, later / every, seconds)

    def _sent(self, plan: Plan) -> int:
        """Return the bytes that leave the busiest node; on a single node what a rank sends."""
        most = cheapest(plan, self._nodes)[1].busiest(plan)
        return most.node_bytes or most.sent_bytes

    def _seconds_of(self, name: str, config: Any, rule: Rule | None, every: int) -> float | None:
        if self._machine is None:
            return None
        if name == "TopKEF":
            found = strategies.compressed(
                self._specs, self._nodes, config.exchange, config, update_rule=rule
            )
        elif self._multiples is not None:
            computed = self._multiples(config)
            found = strategies.of_method(self._specs, self._nodes, config, name, computed)
        else:
            return math.inf
        return self._seconds(found, every)

    def _seconds(self, found: Strategy, every: int = 1) -> float | None:
        if self._machine is None or self._training is None:
            return None
        if every > 1:
            return local_step(found, self._machine, self._training, every).seconds
        return step(found, self._machine, self._training, overlap=True).seconds


def fit_to(optimizer: str | None) -> Fit:
    """Return a function that fits methods to the optimizer of `--optimizer`."""
    rule = update_rule_of(optimizer_of(optimizer))

    def fit(config: Method, deferred: Mapping[str, str]) -> tuple[Method, Rule | None]:
        left = "" if rule is not None else HAS_NONE
        linear = optimizer in (None, "sgd")
        config, why = fitted(
            config, deferred, str(optimizer), lambda: left, ratio=None, is_linear=linear
        )
        return config, rule if why is None else None

    return fit
