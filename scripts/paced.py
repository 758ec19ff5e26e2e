"""Runs a Horovod script of PyTorch whose ranks wait as long as their bytes take on a slow link.

    horovodrun -np 2 --gloo python scripts/paced.py 1gbit examples/pytorch_digits.py

Ranks of one machine exchange over loopback, which is no network: it has no bandwidth to save. Here
each rank sleeps after each step for the bytes that it sent, divided by the rate. It needs no root
(`scripts/netlab` emulates real links, and does). Messages, headers and overlap are left out.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
import types
from pathlib import Path
from typing import Any

import horovod.torch as hvd

from horovod_topk.core.exchange.protocol import ring_allreduce_bytes
from horovod_topk.core.run.substitute import VARIABLE
from horovod_topk.cost.quantities import bits_per_second
from horovod_topk.errors import TopKError
from horovod_topk.torch import TopKEF


class Link:
    """Makes a rank wait as long as its optimizer's bytes would take on a link of `rate` bit/s."""

    def __init__(self, optimizer: Any, rate: float) -> None:
        self.rate = rate
        self.octets = ring_allreduce_bytes(_dense_bytes(optimizer), hvd.size())
        with contextlib.suppress(TopKError):  # Horovod's own exchange has no state
            TopKEF.of(optimizer).on_step(self._count)

    def _count(self, counters: Any) -> None:
        self.octets = counters.sent_bytes

    def wait(self) -> None:
        """Wait for the bytes of the last step."""
        time.sleep(8 * self.octets / self.rate)


def _dense_bytes(optimizer: Any) -> int:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    fp16 = optimizer._compression is hvd.Compression.fp16 or os.environ.get(VARIABLE) == "fp16"
    width = 2 if fp16 else 4
    return sum(width * each.numel() for each in parameters if each.requires_grad)


def paced(make: Any, rate: float) -> Any:
    """`hvd.DistributedOptimizer` whose steps end when their bytes would have left."""

    def distributed(*args: Any, **settings: Any) -> Any:
        optimizer = make(*args, **settings)
        link, step = Link(optimizer, rate), type(optimizer).step

        def waiting(own: Any, *args: Any, **rest: Any) -> Any:
            result = step(own, *args, **rest)
            link.wait()
            return result

        optimizer.step = types.MethodType(waiting, optimizer)  # schedulers use its __func__
        return optimizer

    return distributed


def main() -> None:
    """Run the script that the arguments name, as the interpreter does."""
    _, rate, script, *arguments = sys.argv
    hvd.DistributedOptimizer = paced(hvd.DistributedOptimizer, bits_per_second(rate))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
