"""Makes the table that shows what compressed AdamW lacks at high learning rates.

Each line of docs/results/adam_causes.jsonl is a run. The runs come from a simulation by hand whose
code is not kept; it selects elements by Top-K, and sends their values in float32.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from study.markdown import table
from study.matrix import losses
from study.results import DENSE, RESULTS, Study

MODELS = "convolutions", "embeddings", "recurrent", "transformer"
RATES = "largest rate", "best rate", "half of it"
GPT = "byte GPT, 0.0025, 1,000 steps", "0.005, 2,000 steps"


def causes(study: Study) -> str:
    """Table with a row for each variant: how many more bits a byte it needs than dense, in %."""
    lines = (RESULTS / "adam_causes.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    bits = {(run["variant"], run["case"], run["seed"]): run["bits_per_byte"] for run in runs}
    rows = []
    for variant in dict.fromkeys(run["variant"] for run in runs if run["variant"] != DENSE):
        row = [variant]
        for rate in RATES:
            found = [c for m in MODELS for c in _costs(bits, variant, f"{m}, {rate}")]
            mean = statistics.mean(losses(found))
            row.append(f"{mean:.2f}%, worst {max(found):+.1f}% ({len(found)})")
        row += [", ".join(f"{cost:+.1f}%" for cost in _costs(bits, variant, case)) for case in GPT]
        rows.append(row)
    return table(["", *RATES, *GPT], rows)


def _costs(bits: dict[tuple[str, str, int], Any], variant: str, case: str) -> list[float]:
    """Compare the runs of a variant with dense, seed by seed: % more bits a byte."""
    seeds = sorted(seed for name, of, seed in bits if (name, of) == (variant, case))
    return [100.0 * (bits[variant, case, i] / bits[DENSE, case, i] - 1.0) for i in seeds]
