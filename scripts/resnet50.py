"""The shapes of a ResNet-50's gradients (He et al. 2015, table 1), last layer first."""

from __future__ import annotations

from collections.abc import Iterator

from horovod_topk.core.plan import TensorSpec

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # (width, blocks)
EXPANSION = 4


def resnet50_specs() -> list[TensorSpec]:
    """All 161 trainable tensors, in the order in which backward reaches them."""
    shapes = list(_shapes())
    return [TensorSpec(str(i), shape, "float32") for i, shape in reversed(list(enumerate(shapes)))]


def _shapes() -> Iterator[tuple[int, ...]]:
    yield from _convolution(64, 3, 7)
    inputs = 64
    for width, blocks in STAGES:
        for block in range(blocks):
            yield from _convolution(width, inputs, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(EXPANSION * width, width, 1)
            if block == 0:
                yield from _convolution(EXPANSION * width, inputs, 1)
            inputs = EXPANSION * width
    yield 1000, inputs
    yield (1000,)


def _convolution(outputs: int, inputs: int, kernel: int) -> Iterator[tuple[int, ...]]:
    """A convolution without a bias, and the batch normalisation behind it."""
    yield outputs, inputs, kernel, kernel
    yield (outputs,)
    yield (outputs,)
