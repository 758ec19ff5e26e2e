"""One tensor that is encoded with error feedback, step after step, to be timed beside `r += g`.

Each step takes one of three gradients with random sign and size, after enough steps for the
residual to settle as in training. All steps take turns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horovod_topk.cli.timing import clocked, in_turns
from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.state.residual import Arenas
from horovod_topk.methods import Method
from horovod_topk.ops.torch import TorchOps

FLOOR = "r += g"  # no error feedback can cost less
SLOW = ("torch.topk", "framework operations")  # every third turn
Step = Callable[[], Any]


@dataclass(frozen=True)
class Gradients:
    """A supply of gradients; each call of `next` sets one up, untimed."""

    pool: list[Tensor]
    current: Tensor

    @classmethod
    def of(cls, *shape: int, seed: int = 0) -> Gradients:
        """For a tensor of this shape."""
        generator = torch.Generator().manual_seed(seed)
        pool = [torch.randn(shape, generator=generator) for _ in range(3)]
        return cls(pool, torch.empty(shape))

    def next(self) -> None:
        """Another one: of random sign, and of a norm that varies by a third."""
        factor = random.choice((-1, 1)) * random.uniform(0.7, 1.3)
        torch.mul(random.choice(self.pool), factor, out=self.current)

    def floor(self) -> Step:
        """Return `r += g`, with a residual of its own."""
        residual = torch.zeros_like(self.current)
        return lambda: residual.add_(self.current)


class Encoding:
    """One tensor with its error feedback, encoded step after step."""

    def __init__(self, gradients: Gradients, method: Method, ops: TorchOps) -> None:
        spec = TensorSpec("w", tuple(gradients.current.shape), "float32")
        self.gradients, self._committed = gradients, 0
        (self.bucket,) = make_plan([spec], method).buckets
        self.codec: PayloadCodec[Tensor] = PayloadCodec(ops)
        self.codec.draw_from(lambda: self._committed, lambda: 0)
        self.arenas = Arenas(self.bucket, torch.zeros(spec.numel), torch.zeros(spec.numel))
        self.payload = self.codec.new_payload(self.bucket)

    def step(self) -> None:
        """Encode and commit."""
        self.encode()
        self.arenas.swap()
        self._committed += 1

    def encode(self) -> None:
        """Write payload and next residual."""
        self.codec.encode(self.arenas, [self.gradients.current], self.payload)

    def settle(self, steps: int) -> Encoding:
        """Let the residual grow to what it is in training, as far as `steps` go."""
        for _ in range(steps):
            self.gradients.next()
            self.step()
        return self

    def decoding(self, payloads: Sequence[Tensor]) -> Step:
        """Return a function that decodes the mean of payloads."""
        gathered, output = torch.cat(list(payloads)), torch.empty_like(self.gradients.current)
        return lambda: self.codec.decode(self.bucket, gathered, 1 / len(payloads), [output])


def milliseconds(
    steps: Mapping[str, Step],
    before: Step | None,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time steps in turns after a warm-up step, each after a call of `before`."""
    timed = {name: clocked(step, before, clock) for name, step in steps.items()}
    found = in_turns(timed, repeats, warm_up=1, one_in=dict.fromkeys(SLOW, 3))
    return {name: [1e3 * each for each in seconds] for name, seconds in found.items()}
