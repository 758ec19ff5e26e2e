"""Whole steps of two simulated ranks in this process, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from horovod_topk.cli.compare.simulated.exchanges import Compressed, compressed
from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.core.run.substitute import parse

RANKS = 2
PARTS = ("encode", "decode, commit", "optimizer's step")
PLAIN = "momentum=0, follow_lr=False, warmup=None"
NamedState = Callable[[], object]
Around = Callable[[str, NamedState], object]  # runs one part of rank 0's step


def directly(name: str, part: NamedState) -> None:
    """Run a part of a step without measuring it."""
    part()


class Training:
    """A model, its optimizer and the gradients of two simulated ranks on one device.

    Args:
        optimizer: adamw, fused adamw, sgd or none.
        call: the compressor; None: dense, so that nothing is compressed.
        device: cuda or cpu.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], optimizer: str, call: str | None, device: str = "cpu"
    ) -> None:
        self.model = nn.ParameterDict(
            {s.name: nn.Parameter(0.02 * torch.randn(s.shape, device=device)) for s in specs}
        )
        parameters = list(self.model.parameters())
        fused = True if optimizer == "fused adamw" else None
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, fused=fused)
        if "adamw" not in optimizer:
            self.optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        self._steps = optimizer != "none"
        for p in parameters:
            p.grad = torch.randn_like(p)
        self.optimizer.step()  # roots of mean squares of 0 take PyTorch seven times longer
        self.exchange: Compressed | None = None
        if call is not None:
            self.exchange = compressed(self.model, self.optimizer, RANKS, parse(call))
        self._drawn = [[torch.randn_like(p) for p in parameters] for _ in range(RANKS)]
        self.gradients = [[torch.empty_like(p) for p in parameters] for _ in range(RANKS)]

    def __call__(self, around: Around = directly) -> None:
        """Make a step with other gradients than in the last one; `around` runs rank 0's parts."""
        signs = torch.randint(0, 2, (RANKS,)).mul(2).sub(1).tolist()
        for now, drawn, sign in zip(self.gradients, self._drawn, signs, strict=True):
            torch._foreach_copy_(now, drawn)
            torch._foreach_mul_(now, sign * 0.5 ** float(torch.rand(())))
        encode, decode, step = PARTS
        if self.exchange is not None:
            around(encode, partial(self.encode, 0))
            self.encode(1)
            around(decode, partial(self.decode, 0))
            self.decode(1)
        if self._steps:
            around(step, self.apply)

    def encode(self, rank: int) -> None:
        """Compress a rank's gradients and start their exchange."""
        compressor, buckets = self._of(rank)
        for ordinal, bucket in buckets.items():
            compressor.launch(ordinal, bucket)

    def decode(self, rank: int) -> None:
        """Overwrite a rank's gradients with the mean of both ranks', and commit."""
        compressor, buckets = self._of(rank)
        compressor.step.finish(buckets)
        compressor.commit()

    def apply(self) -> None:
        """Make the optimizer's step with the gradients of rank 0."""
        for p, gradient in zip(self.model.parameters(), self.gradients[0], strict=True):
            p.grad = gradient
        self.optimizer.step()

    def residuals(self) -> list[Tensor]:
        """Return the residuals of rank 0, in the order of the parameters."""
        assert self.exchange is not None
        return [self.exchange.compressors[0].residual(name) for name in self.model]

    def _of(self, rank: int) -> tuple[StepRunner[Tensor], dict[int, list[Tensor]]]:
        assert self.exchange is not None
        return self.exchange.compressors[rank], self.exchange.in_buckets(self.gradients[rank])
