"""Table of variants of AdamW, which say why it falls behind at high rates.

docs/results/adam_causes.jsonl has a run in each line. They come from a simulation by hand, with
Top-K but without coding, whose code is not kept.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from study.markdown import rounded, table
from study.results import RESULTS, Study

DENSE = "dense"
MODELS = "convolutions", "embeddings", "recurrent", "transformer"
RATES = "largest rate", "best rate", "half of it"
GPT = "byte GPT, 0.0025, 1,000 steps", "0.005, 2,000 steps"


def causes(study: Study) -> str:
    """A row for each variant: increase in bits a byte over dense with the same seed."""
    lines = (RESULTS / "adam_causes.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    bits = {(run["variant"], run["case"], run["seed"]): run["bits_per_byte"] for run in runs}
    rows = []
    for variant in dict.fromkeys(run["variant"] for run in runs if run["variant"] != DENSE):
        row = [variant]
        for rate in RATES:
            found = [c for m in MODELS for c in _costs(bits, variant, f"{m}, {rate}")]
            mean = statistics.mean(max(0.0, cost) for cost in found)
            row.append(f"{rounded(mean):.2f}%, worst {max(found):+.1f}% ({len(found)})")
        row += [", ".join(f"{cost:+.1f}%" for cost in _costs(bits, variant, case)) for case in GPT]
        rows.append(row)
    return table(["", *RATES, *GPT], rows)


def _costs(bits: dict[tuple[str, str, int], Any], variant: str, case: str) -> list[float]:
    """Increase over dense in %, of each seed."""
    seeds = sorted(seed for name, of, seed in bits if (name, of) == (variant, case))
    return [100.0 * (bits[variant, case, i] / bits[DENSE, case, i] - 1.0) for i in seeds]
