"""Shapes of gradients: those of well-known models, or those in a file.

Deep Residual Learning (He et al. 2015, table 1), BERT (Devlin et al. 2018), GPT-2 (Radford et al.
2019); as published, without the heads that pre-training adds to BERT.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from horovod_topk.cli.reading import fits
from horovod_topk.core.plan.buckets import TensorSpec

Shape = tuple[int, ...]

STAGES = ((64, 2, 3), (128, 2, 4), (256, 2, 6), (512, 2, 3))  # width, blocks of ResNet-18, -50
EXPANSION = 4
LAYERS, WIDTH = 12, 768  # of BERT base and of GPT-2

WRITES = "`json.dump({n: p.shape for n, p in model.named_parameters()}, open('shapes.json', 'w'))`"


def resnet18() -> Iterator[Shape]:
    """Shapes of a ResNet-18: 11,689,512 parameters."""
    yield from _convolution(64, 3, 7)
    inputs = 64
    for width, blocks, _ in STAGES:
        for _ in range(blocks):
            yield from _convolution(width, inputs, 3)
            yield from _convolution(width, width, 3)
            if inputs != width:
                yield from _convolution(width, inputs, 1)
            inputs = width
    yield from _linear(1000, inputs)


def resnet50() -> Iterator[Shape]:
    """Shapes of a ResNet-50: 25,557,032 parameters."""
    yield from _convolution(64, 3, 7)
    inputs = 64
    for width, _, blocks in STAGES:
        for block in range(blocks):
            yield from _convolution(width, inputs, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(EXPANSION * width, width, 1)
            if block == 0:
                yield from _convolution(EXPANSION * width, inputs, 1)
            inputs = EXPANSION * width
    yield from _linear(1000, inputs)


def bert_base() -> Iterator[Shape]:
    """Shapes of a BERT base: 109,482,240 parameters."""
    for rows in (30522, 512, 2):  # words, positions, segments
        yield rows, WIDTH
    yield from _normalisation()
    for _ in range(LAYERS):
        for _ in range(4):  # queries, keys, values, output
            yield from _linear(WIDTH, WIDTH)
        yield from _normalisation()
        yield from _linear(4 * WIDTH, WIDTH)
        yield from _linear(WIDTH, 4 * WIDTH)
        yield from _normalisation()
    yield from _linear(WIDTH, WIDTH)


def gpt2() -> Iterator[Shape]:
    """Shapes of a GPT-2: 124,439,808 parameters."""
    for rows in (50257, 1024):  # tokens, positions
        yield rows, WIDTH
    for _ in range(LAYERS):
        yield from _normalisation()
        yield from _linear(3 * WIDTH, WIDTH)
        yield from _linear(WIDTH, WIDTH)
        yield from _normalisation()
        yield from _linear(4 * WIDTH, WIDTH)
        yield from _linear(WIDTH, 4 * WIDTH)
    yield from _normalisation()


MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "bert-base": bert_base,
    "gpt2": gpt2,
}


def _convolution(outputs: int, inputs: int, kernel: int) -> Iterator[Shape]:
    """Shapes of a convolution without a bias, and of the batch normalisation after it."""
    yield outputs, inputs, kernel, kernel
    yield (outputs,)
    yield (outputs,)


def _linear(outputs: int, inputs: int) -> Iterator[Shape]:
    yield outputs, inputs
    yield (outputs,)


def _normalisation() -> Iterator[Shape]:
    yield (WIDTH,)
    yield (WIDTH,)


def specs_of(model: str) -> list[TensorSpec]:
    """float32 gradients of one of `MODELS`, or of a JSON file: an object from names to shapes.

    They are in the order in which backward reaches them.
    """
    if model in MODELS:
        shapes = list(enumerate(MODELS[model]()))
        return [TensorSpec(str(i), shape, "float32") for i, shape in reversed(shapes)]
    path = _file(model)
    try:
        shapes = json.loads(path.read_text()).items()
    except OSError as error:
        raise ValueError(f"--model {model}: it cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f'--model {model}: it is not a JSON object such as {{"weight": [3, 4]}}'
        ) from error
    specs = [TensorSpec(name, _shape(model, name, shape), "float32") for name, shape in shapes]
    if not elements(specs):
        raise ValueError(f"--model {model}: it has no elements. Give at least one non-empty shape")
    return specs


def _file(model: str) -> Path:
    path, known = Path(model), ", ".join(MODELS)
    if path.is_dir():
        raise ValueError(f"--model {model}: that is a folder. Name a JSON file of shapes in it")
    if path.exists():
        return path
    if path.name != model or path.suffix:
        raise ValueError(
            f"--model {model}: there is no such file. Give the path of a JSON file of shapes, or "
            f"one of {known}. In PyTorch {WRITES} writes such a file"
        )
    raise ValueError(
        f"--model {model}: no model of that name is known. Give one of {known}, or the path of a "
        f"JSON file of shapes, which in PyTorch {WRITES} writes (docs/plan.md has it for Keras)"
    )


def _shape(model: str, name: str, given: object) -> Shape:
    if isinstance(given, list) and fits(tuple[int, ...], given):
        return tuple(given)
    raise ValueError(
        f"--model {model}: {name!r} has the shape {json.dumps(given)}. Give whole numbers of 0 or "
        "more, as in [3, 4]"
    )


def elements(specs: list[TensorSpec]) -> int:
    """Number of elements of all tensors together."""
    return sum(math.prod(spec.shape) for spec in specs)
