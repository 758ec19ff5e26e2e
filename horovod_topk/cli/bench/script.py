"""Times a user's own script, run once for each method until it has made enough steps.

The script runs unchanged in this process. Its `hvd.DistributedOptimizer` gets the method's
compression instead of its own, and is timed from the end of one step to the end of the next.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import math
import runpy
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.torch as hvd

from horovod_topk.cli.bench.measure import Cost, Taken, taken
from horovod_topk.cli.bench.methods import DENSE, NONE, OTHER, TOPK, Method
from horovod_topk.cli.bench.nic import Sent, sent
from horovod_topk.cli.bench.ranks import Ranks, barrier
from horovod_topk.cli.bench.runners import compression_of

WARM_UP = 6  # steps
KINDS = (NONE, DENSE, "fp16", TOPK, OTHER)  # kinds of methods that a script can be timed with


class _Enough(BaseException):  # so that a script's `except Exception` does not catch it
    """Ends a script that has made enough steps."""


@dataclass
class Watch:
    """Times the steps of the first distributed optimizer that a script makes."""

    ranks: Ranks
    rounds: int
    interface: str | None
    ends: list[Cost] = field(default_factory=list)  # clocks at the end of each step
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of its parameters
    before: Sent | None = None
    octets: float = math.nan  # bytes that left this host's card in a step, if counted

    def follow(self, optimizer: Any) -> None:
        """Call `end` after each step of an optimizer."""
        if self.shapes:
            return
        groups = optimizer.param_groups
        self.shapes = [tuple(each.shape) for group in groups for each in group["params"]]
        step = type(optimizer).step

        def timed(own: Any, *args: Any, **rest: Any) -> Any:
            result = step(own, *args, **rest)
            self.end()
            return result

        optimizer.step = types.MethodType(timed, optimizer)  # schedulers use its __func__

    def end(self) -> None:
        """Note the end of a step; end the script after the last one."""
        self.ends.append(Cost.so_far())
        if self.interface is not None and len(self.ends) == WARM_UP:
            self.before = sent(self.interface)
        if len(self.ends) < WARM_UP + self.rounds:
            return
        barrier(self.ranks)
        if self.interface is not None and self.before is not None:
            self.octets = (sent(self.interface) - self.before).bytes / self.rounds
        raise _Enough

    def costs(self) -> list[Cost]:
        """The times of the timed steps."""
        ends = self.ends[WARM_UP - 1 :]
        return [end - begin for begin, end in itertools.pairwise(ends)]


def check(methods: Sequence[Method]) -> None:
    """Refuse methods that cannot be timed with a script that uses Horovod."""
    for method in methods:
        if method.adapter != "torch" or method.kind not in KINDS:
            raise ValueError(
                f"--script: {method.name} is no compression of hvd.DistributedOptimizer. "
                f"Give --methods of {', '.join(KINDS)}"
            )


def time_script(
    ranks: Ranks,
    path: Path,
    arguments: Sequence[str],
    method: Method,
    rounds: int,
    interface: str | None,
) -> tuple[Taken, list[tuple[int, ...]]]:
    """Time a script's steps, and return its parameters' shapes too."""
    watch = Watch(ranks, rounds, interface)
    with _compressed(method, watch), _called(path, arguments):
        how = _run(path)
    gc.collect()
    if len(watch.ends) < WARM_UP + rounds:
        raise ValueError(
            f"--script {path} ended{how} after {len(watch.ends)} steps of an "
            f"hvd.DistributedOptimizer, of which it takes {WARM_UP + rounds}: lower --rounds, or "
            "let it train longer"
        )
    return taken(ranks, watch.costs(), watch.octets), watch.shapes


def _run(path: Path) -> str:
    """Run a script until it has made enough steps or ends; return how it ended, if by sys.exit."""
    try:
        runpy.run_path(str(path), run_name="__main__")
    except _Enough:
        pass
    except SystemExit as ended:  # it must not end this process
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
            given.arguments["compression"] = compression_of(method)
            optimizer = original(*given.args, **given.kwargs)
        watch.follow(optimizer)
        return optimizer

    with mock.patch.object(hvd, "DistributedOptimizer", stand_in):
        yield


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _called(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set sys.argv and sys.path as the interpreter does for a script."""
    argv = [str(path), *arguments]
    folders = [str(path.resolve().parent), *sys.path]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", folders):
        yield
