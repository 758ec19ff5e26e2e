"""Kernels for GPUs in Triton: four launches encode a bucket or its shards; two decode buckets.

`topk/` has a bucket of Top-K. An encode has four passes, a file each: `stream` adds gradients to
residuals, `narrow` brackets each tensor's threshold, `scatter` finds it and the indices, and `pack`
encodes indices and values. `index_coding` decodes indices, and `gather` all else. `baselines/` has
the fourth pass of methods that send all elements, whose first two are the same. Results have the
same bits as those of `horovod_topk.ops`, except the bits of NaNs. `updates/` has lists of tensors:
it adapts the optimizer's steps to the exchange.

Importing this package imports neither Triton nor torch; `TritonBucket` is in `.topk.bucket`.

Reference: Triton, https://triton-lang.org. TRITON_INTERPRET=1, set before Triton is imported, runs
the same kernels on the CPU, slowly: for tests.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType

from horovod_topk.kernels.triton.topk.tables import (
    AS_IS,
    FLOAT32,
    HEAD,
    LONGEST,
    MEANS,
    MINMAX,
    MOST,
    SHARE,
)

OLDEST = 3, 6  # the oldest Triton that compiles the kernels, and launches them as `launching` does
_FLOAT64 = 8  # bytes


def unsupported(recipe: Sequence[int], device: str) -> str | None:
    """Why a bucket of this recipe has no kernel on this device; None if it has one."""
    return unavailable(device) or _unfit(recipe)


def unavailable(device: str) -> str | None:
    """Why no Triton kernels can run on this device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    kind = device.partition(":")[0]
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if kind != "cuda" and not (kind == "cpu" and interpreted):
        return f"the Triton kernels do not run on {device}"
    try:
        found = version()
        is_old = tuple(map(int, found.split(".")[:2])) < OLDEST
    except (ImportError, AttributeError, ValueError) as error:
        return f"Triton cannot be imported, or does not say its version: {error}"
    return f"Triton {found} is older than {'.'.join(map(str, OLDEST))}" if is_old else None


@functools.cache
def module(name: str, kind: str) -> ModuleType | None:
    """A module of kernels, such as "updates.lists", for a kind of device; None if it has none."""
    if kind != "cuda" or unavailable(kind) is not None:
        return None
    return importlib.import_module(f"horovod_topk.kernels.triton.{name}")


def version() -> str:
    """Triton's version, on whose compiler the order of sums may depend."""
    return str(importlib.import_module("triton").__version__)


def _unfit(recipe: Sequence[int]) -> str | None:
    if recipe[2] == MEANS and max(recipe[HEAD + 9 :: SHARE], default=0) > LONGEST:
        return f"it has a column of more than {LONGEST} elements"
    if FLOAT32 < recipe[2] < MINMAX and AS_IS in recipe[HEAD + 3 :: SHARE]:
        return "it has float32 values beside others"
    sizes, parts = recipe[HEAD::SHARE], recipe[6]
    numel = max(sum(sizes), parts * max(sizes, default=0))
    if recipe[1] == _FLOAT64:
        return "residuals are float64"
    if numel > MOST:
        return f"{numel} elements are more than the {MOST} the Triton kernels can address"
    if recipe[4] > MOST:
        return f"{recipe[4]} bytes of payload are more than the {MOST} the kernels can address"
    return None
