"""Models of 11 and 25 million parameters on simulated ranks, for docs/does-it-pay.md.

`horovod-topk compare --simulated` calls `workload(**options)`. The text is the Python sources of
the installed torch package, 46 MB, split by file.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))

from study.loops import Loop, Text
from study.networks import CausalConvolutions
from study.workloads import pytorch_bytelm, source_files

SOURCES = Path(torch.__file__).parent
POINTS = 12  # evaluations of a run


class GPT(Text):
    """A byte GPT of the sizes of GPT-2's blocks: 25.5 million parameters."""

    model, batch_size = partial(pytorch_bytelm.ByteGPT, width=512, heads=8, layers=8), 2

    def columns(self, split: str) -> tuple[Tensor, ...]:
        """Rows of text; sorted by name of the file for skewed shards."""
        return (_sources(split, by_name=self.skewed),)


class Convolutions(GPT):
    """The dilated convolutions of loops.py with 11.0 million parameters."""

    model = partial(CausalConvolutions, 768, (1, 2, 4, 8, 16, 32))


LOOPS = {"gpt": GPT, "convolutions": Convolutions}


def workload(*, model: str, **options: Any) -> Loop:
    """A model with its options, for `horovod-topk compare --simulated`."""
    loop: Loop = LOOPS[model](**options)
    loop.every = max(1, loop.steps // POINTS)
    return loop


@cache
def _sources(split: str, *, by_name: bool = False) -> Tensor:
    files = source_files.of_split(split, SOURCES)
    return pytorch_bytelm.in_rows(sorted(files) if by_name else files)
