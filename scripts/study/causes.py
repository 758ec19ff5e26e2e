"""Makes the tables that show how the rules of AdamW and SGD came about.

Each line of sgd_factors.jsonl and of adam_*.jsonl in docs/results is a run; null: it diverged.
The runs come from a simulation by hand whose code is not kept; it sends k elements of each tensor,
in float32.
"""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

from pages.markdown import table
from study.matrix import losses
from study.results import DENSE, RESULTS, Study

MODELS = "convolutions", "embeddings", "recurrent", "transformer"
RATES = "largest rate", "best rate", "half of it"
GPT = "byte GPT, 0.0025, 1,000 steps", "0.005, 2,000 steps"


def causes(study: Study) -> str:
    """Table with a row for each variant: how many more bits a byte it needs than dense, in %."""
    bits, rows = _bits("adam_causes.jsonl"), []
    for variant in _variants(bits):
        row = [variant]
        for rate in RATES:
            found = [c for m in MODELS for c in _costs(bits, variant, f"{m}, {rate}")]
            mean = statistics.mean(losses(found))
            row.append(f"{mean:.2f}%, worst {max(found):+.1f}% ({len(found)})")
        row += [", ".join(f"{cost:+.1f}%" for cost in _costs(bits, variant, case)) for case in GPT]
        rows.append(row)
    return table(["", *RATES, *GPT], rows)


def by_seed(study: Study, name: str) -> str:
    """Make a table of what each variant of a file costs: % more bits a byte than dense, by seed."""
    bits = _bits(f"{name}.jsonl")
    cases = list(dict.fromkeys(case for _, case, _ in bits))
    rows = [
        [variant, *(", ".join(map(_shown, _costs(bits, variant, case))) for case in cases)]
        for variant in _variants(bits)
    ]
    return table(["", *cases], rows)


def _shown(cost: float) -> str:
    return "diverged" if math.isinf(cost) else f"{cost:+.1f}"


def _bits(name: str) -> dict[tuple[str, str, int], Any]:
    """Read how many bits a byte each run of a file ended at, by variant, case and seed."""
    runs = [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]
    ends = [math.inf if run["bits_per_byte"] is None else run["bits_per_byte"] for run in runs]
    keys = [(run["variant"], run["case"], run["seed"]) for run in runs]
    return dict(zip(keys, ends, strict=True))


def _variants(bits: dict[tuple[str, str, int], Any]) -> list[str]:
    """List the variants other than dense, in the order of the file."""
    return [each for each in dict.fromkeys(name for name, _, _ in bits) if each != DENSE]


def _costs(bits: dict[tuple[str, str, int], Any], variant: str, case: str) -> list[float]:
    """Compare the runs of a variant with dense, seed by seed: % more bits a byte."""
    seeds = sorted(seed for name, of, seed in bits if (name, of) == (variant, case))
    return [100.0 * (bits[variant, case, i] / bits[DENSE, case, i] - 1.0) for i in seeds]
