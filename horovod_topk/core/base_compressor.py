"""What the `TopKEF` of every framework has in common.

Its settings, the questions it passes on to the state behind it, and when there is none.
"""

from __future__ import annotations

import abc
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

from horovod_topk.config import TopKConfig, reject_unknown
from horovod_topk.core.stats import Stats, StepCounters
from horovod_topk.errors import ConfigError, NotAttachedError
from horovod_topk.ratios import Asked, checked_rules

ALONE = "world size 1: there is nobody to exchange with"  # why nothing is compressed
TAKE_OVER = "optimizer"  # as `momentum`: the optimizer's own, from there on corrected
_SETTINGS = ("config", "takes_over", "grad_scaler", "commit_dir")
COMPACT: Mapping[str, Any] = {"ratio": 0.024, "values": "int4", "momentum": TAKE_OVER}


class State(Protocol):
    """Error feedback behind one optimizer, or behind a `BaseCompressor` with one optimizer."""

    framework: str  # "torch" or "tensorflow"

    @property
    def active(self) -> bool:
        """Whether anything is compressed here."""
        ...

    @property
    def steps(self) -> int:
        """How many steps have ended, committed or rolled back: as many on every rank."""
        ...

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and of how many that exchange."""
        ...

    @property
    def reduction(self) -> str:
        """What is applied: the "average" or the "sum" over ranks."""
        ...

    def stats(self) -> Stats:
        """Totals and norms so far."""
        ...

    @property
    def tensors(self) -> dict[str, list[int]]:
        """Shapes of the gradients that are compressed, by name, as far as they are known."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's residuals."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take on residuals that this rank saved."""
        ...

    def reset(self) -> None:
        """Forget all residuals."""
        ...

    def on_step(self, callback: Callable[[StepCounters], None]) -> None:
        """Call `callback` at the end of every step."""
        ...


class BaseCompressor(abc.ABC):
    """Settings as keyword arguments; questions answered by the one state behind an instance."""

    def __init__(
        self,
        ratio: float = TopKConfig.ratio,
        *,
        values: str = TopKConfig.values,
        indices: str = TopKConfig.indices,
        exchange: str = TopKConfig.exchange,
        gather_ratio: float | None = TopKConfig.gather_ratio,
        selection: str = TopKConfig.selection,
        min_numel: int = TopKConfig.min_numel,
        clip_norm: float | None = TopKConfig.clip_norm,
        warmup: int | Sequence[tuple[int, float]] | None = TopKConfig.warmup,
        momentum: float | str = TopKConfig.momentum,
        nesterov: bool = TopKConfig.nesterov,
        follow_lr: bool = TopKConfig.follow_lr,
        ratios: Asked | None = TopKConfig.ratios,
        name: str | None = TopKConfig.name,
        grad_scaler: Any = None,
        commit_dir: str | os.PathLike[str] | None = None,
        **unknown: object,
    ) -> None:
        reject_unknown(unknown, {*TopKConfig.__dataclass_fields__, "grad_scaler", "commit_dir"})
        self._check_scaler(grad_scaler)
        self.grad_scaler = grad_scaler
        self.commit_dir = commit_dir
        self.takes_over = momentum == TAKE_OVER  # the optimizer's momentum, when it is known
        if self.takes_over and nesterov:
            raise ConfigError(
                f"nesterov={nesterov!r} was given with momentum={TAKE_OVER!r}, which takes over "
                "whether the optimizer's is Nesterov's as well",
                cure="Leave nesterov= out, and set it in the optimizer",
            )
        self.config = TopKConfig(
            ratio,
            values,
            indices,
            exchange,
            gather_ratio,
            selection,
            min_numel,
            clip_norm,
            warmup,  # type: ignore[arg-type]  # pairs become a tuple where they are checked
            TopKConfig.momentum if momentum == TAKE_OVER else momentum,  # type: ignore[arg-type]
            nesterov,
            follow_lr,
            checked_rules(ratios),
            name,
        )

    def __getstate__(self) -> dict[str, Any]:
        """The settings: a copy, or what is unpickled elsewhere, has no optimizer yet."""
        return {setting: getattr(self, setting) for setting in _SETTINGS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @classmethod
    def compact(cls, **settings: Any) -> Self:
        """What measured best at about 50 times fewer bytes: the optimizer's momentum, corrected.

        Values of 4 bits, a ratio of 0.024, and `momentum="optimizer"`; docs/frontier.md says how
        far that is from dense.

        Args:
            settings: of `TopKEF`, further ones or others.
        """
        return cls(**{**COMPACT, **settings})

    @classmethod
    def asked(cls, compression: object) -> Self | None:
        """The compressor a user passed, if it is ours: an instance, or the class with defaults."""
        if isinstance(compression, cls):
            return compression
        if isinstance(compression, type) and issubclass(compression, cls):
            return compression()
        return None

    @property
    def behind(self) -> State:
        """The state of the one optimizer behind this instance.

        Raises:
            NotAttachedError: there is none, or there are several.
        """
        return self._only_state()

    def stats(self) -> Stats:
        """As `OptimizerState.stats`, of the one optimizer behind this instance."""
        return self._only_state().stats()

    @property
    def tensors(self) -> dict[str, list[int]]:
        """As `OptimizerState.tensors`, of the one optimizer behind this instance."""
        return self._only_state().tensors

    @property
    def reduction(self) -> str:
        """As `OptimizerState.reduction`, of the one optimizer behind this instance."""
        return self._only_state().reduction

    @property
    def active(self) -> bool:
        """As `OptimizerState.active`, of the one optimizer behind this instance."""
        return self._only_state().active

    @property
    def steps(self) -> int:
        """As `OptimizerState.steps`, of the one optimizer behind this instance."""
        return self._only_state().steps

    @property
    def place(self) -> tuple[int, int]:
        """As `OptimizerState.place`, of the one optimizer behind this instance."""
        return self._only_state().place

    def state_dict(self) -> dict[str, Any]:
        """As `OptimizerState.state_dict`, of the one optimizer behind this instance."""
        return self._only_state().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `OptimizerState.load_state_dict`, of the one optimizer behind this instance."""
        self._only_state().load_state_dict(state)

    def reset(self) -> None:
        """As `OptimizerState.reset`, of the one optimizer behind this instance."""
        self._only_state().reset()

    def on_step(self, callback: Callable[[StepCounters], None]) -> None:
        """As `OptimizerState.on_step`, of the one optimizer behind this instance."""
        self._only_state().on_step(callback)

    def _begin(self) -> None:  # noqa: B027  # there may be nothing to begin with
        """Have no optimizer, and nothing asked for."""

    @staticmethod
    @abc.abstractmethod
    def _check_scaler(scaler: object) -> None:
        """Refuse what cannot be used as `grad_scaler=`; raises ConfigError."""

    @abc.abstractmethod
    def _living_states(self) -> Sequence[State]:
        """The states behind this instance, oldest first."""

    def _only_state(self) -> State:
        if len(self._living_states()) > 1:
            gc.collect()  # Horovod's optimizers are reference cycles
        states = self._living_states()
        if len(states) != 1:
            raise NotAttachedError(
                f"{len(states)} optimizers use this TopKEF, exactly one was expected",
                cure="Ask TopKEF.of(optimizer) for the state behind one optimizer",
            )
        return states[0]


class ProcessSet(Protocol):
    """What Horovod's process sets of every framework answer."""

    def included(self) -> bool:
        """Whether this rank is one of them."""
        ...

    def size(self) -> int:
        """How many ranks they are."""
        ...


def elastic() -> bool:
    """Whether ranks may come and go (`horovodrun --min-np`)."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def check_elastic(config: TopKConfig) -> None:
    """Refuse an exchange with owners where ranks may come and go.

    Raises:
        ConfigError: they may.
    """
    exchange = config.exchange
    if exchange in ("sharded", "hierarchical") and elastic():
        raise ConfigError(
            f"exchange={exchange!r} deals residuals out to a fixed number of ranks, and this job "
            "is elastic",
            cure="Pass exchange='allgather', or run without --min-np and --max-np",
        )


def check_kept(manager: object | None, what: str) -> None:
    """Refuse what ranks that join an elastic job would not know, where its state does not tell.

    Raises:
        ConfigError: nobody keeps it.
    """
    if elastic() and manager is None:
        raise ConfigError(
            f"{what} ranks that join this elastic job would not hear",
            cure="Pass the TopKEF to the job's state, as horovod_topk.elastic says",
        )


def check_all_exchange(process_set: Any) -> None:
    """Refuse an optimizer of some of the ranks, where all of them come and go together.

    Raises:
        ConfigError: it has a process set of its own.
    """
    if process_set.process_set_id != 0:
        raise ConfigError(
            f"the optimizer's gradients are exchanged in process set {process_set.process_set_id}, "
            "and the ranks of an elastic state are all",
            cure="Leave process_set= out, or the TopKEF out of the elastic state",
        )


def why_inactive(process_set: ProcessSet) -> str | None:
    """Why nothing will be compressed, if so."""
    if not process_set.included():
        return "this rank is not in the optimizer's process set"
    if process_set.size() == 1 and not elastic():
        return ALONE
    return None
