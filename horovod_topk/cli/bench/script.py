"""A user's own script, run once for each method until it has made enough steps.

It is run as it is, in this process; the `hvd.DistributedOptimizer` that it calls takes the method's
compression in place of its own, and is timed from the end of one step to the end of the next.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.torch as hvd

from horovod_topk.cli.bench.card import Sent, sent
from horovod_topk.cli.bench.contestants import compressor
from horovod_topk.cli.bench.measure import Cost, Taken, taken
from horovod_topk.cli.bench.meeting import meet
from horovod_topk.cli.bench.methods import NONE, OTHER, TOPK, Method

WARM_UP = 6  # steps
COMPRESSIONS: dict[str, Callable[[Method], Any]] = {
    NONE: lambda method: None,
    "dense": lambda method: hvd.Compression.none,
    "fp16": lambda method: hvd.Compression.fp16,
    TOPK: compressor,
    OTHER: compressor,
}


class _Enough(BaseException):  # no error, and not for a script's `except Exception`
    """Leaves a script that has made enough steps."""


@dataclass
class Watch:
    """Times the steps of the first distributed optimizer that a script makes."""

    rounds: int
    interface: str | None
    ends: list[Cost] = field(default_factory=list)  # of steps
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of what it trains
    before: Sent | None = None
    octets: float | None = None  # left this host's card in a step

    def follow(self, optimizer: Any) -> None:
        """Call `end` at the end of each step."""
        if self.shapes:
            return
        groups = optimizer.param_groups
        self.shapes = [tuple(each.shape) for group in groups for each in group["params"]]
        step = type(optimizer).step

        def timed(own: Any, *args: Any, **rest: Any) -> Any:
            result = step(own, *args, **rest)
            self.end()
            return result

        optimizer.step = types.MethodType(timed, optimizer)  # schedulers look for its __func__

    def end(self) -> None:
        """Of a step; the last one leaves the script."""
        self.ends.append(Cost.so_far())
        if self.interface is not None and len(self.ends) == WARM_UP:
            self.before = sent(self.interface)
        if len(self.ends) < WARM_UP + self.rounds:
            return
        meet()
        if self.interface is not None and self.before is not None:
            self.octets = (sent(self.interface) - self.before).bytes / self.rounds
        raise _Enough

    def costs(self) -> list[Cost]:
        """Of each timed step."""
        ends = self.ends[WARM_UP - 1 :]
        return [end - begin for begin, end in itertools.pairwise(ends)]


def check(methods: Sequence[Method]) -> None:
    """A script that uses Horovod can be timed in these ways.

    Raises:
        ValueError: it cannot in one of them.
    """
    for method in methods:
        if method.is_ddp or method.kind not in COMPRESSIONS:
            raise ValueError(
                f"--script: {method.name} is no compression of hvd.DistributedOptimizer. "
                f"Give --methods of {', '.join(COMPRESSIONS)}"
            )


def time_script(
    path: Path, arguments: Sequence[str], method: Method, rounds: int, interface: str | None
) -> tuple[Taken, list[tuple[int, ...]]]:
    """What its steps took, and the shapes of its parameters.

    Raises:
        ValueError: it ended too early, or never made a distributed optimizer.
    """
    watch = Watch(rounds, interface)
    with _compressed(method, watch), _called(path, arguments):
        how = _run(path)
    gc.collect()
    if len(watch.ends) < WARM_UP + rounds:
        raise ValueError(
            f"--script {path} ended{how} after {len(watch.ends)} steps of an "
            f"hvd.DistributedOptimizer, of which it takes {WARM_UP + rounds}: lower --rounds, or "
            "let it train longer"
        )
    return taken(watch.costs(), watch.octets), watch.shapes


def _run(path: Path) -> str:
    """Until it has made enough steps, or ends; how it ended, where it said so itself."""
    try:
        runpy.run_path(str(path), run_name="__main__")
    except _Enough:
        pass
    except SystemExit as ended:  # would end this process, which has nothing to report yet
        return f" by sys.exit({ended.code!r})"
    return ""


@contextlib.contextmanager
def _compressed(method: Method, watch: Watch) -> Iterator[None]:
    """Give the method's compression to every optimizer, and watch the first."""
    original = hvd.DistributedOptimizer
    signature = inspect.signature(original)

    def stand_in(*args: Any, **rest: Any) -> Any:
        given = signature.bind(*args, **rest)
        optimizer = given.arguments["optimizer"]
        if method.kind == NONE:
            optimizer.synchronize, optimizer.skip_synchronize = _nothing, contextlib.nullcontext
        else:
            given.arguments["compression"] = COMPRESSIONS[method.kind](method)
            optimizer = original(*given.args, **given.kwargs)
        watch.follow(optimizer)
        return optimizer

    with mock.patch.object(hvd, "DistributedOptimizer", stand_in):
        yield


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _called(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """As the interpreter starts a script."""
    argv = [str(path), *arguments]
    folders = [str(path.resolve().parent), *sys.path]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", folders):
        yield
