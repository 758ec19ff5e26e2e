"""Benchmarks, each a module with `main`: `python scripts/bench.py NAME`.

A module NAME measures and writes docs/results; NAME_page turns results into the figures of a page
(`pages`); NAME_rank runs on every rank of a job.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # their models, data and schedules
