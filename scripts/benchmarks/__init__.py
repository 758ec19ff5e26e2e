"""Benchmarks: `python scripts/bench.py NAME`.

A module NAME measures, with `main` or with the jobs of `JOBS`, and writes docs/results; its
`values` are the figures of a page (`pages`). NAME_rank has what runs on every rank of a job.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # their models, data and schedules
