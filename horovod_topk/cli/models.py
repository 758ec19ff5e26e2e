"""Shapes of gradients: a ResNet-50's (He et al. 2015, table 1), or those of a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

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


def specs_of(model: str) -> list[TensorSpec]:
    """float32 gradients of `resnet50`, or of a JSON file: an object with a shape for each name.

    Raises:
        ValueError: it is neither.
    """
    if model == "resnet50":
        return resnet50_specs()
    path = Path(model)
    if not path.is_file():
        raise ValueError(f"{model} is neither resnet50 nor a file of shapes")
    try:
        shapes = json.loads(path.read_text())
        return [
            TensorSpec(name, tuple(map(int, shape)), "float32") for name, shape in shapes.items()
        ]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f'{model} is no JSON object such as {{"weight": [3, 4]}}') from error


def elements(specs: list[TensorSpec]) -> int:
    """Elements of all of them."""
    return sum(math.prod(spec.shape) for spec in specs)
