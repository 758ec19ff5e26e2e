"""The case files on real ranks: one test for each line of `launches.JOBS`.

The cases themselves are in ranks/case_*.py (PyTorch) and tensorflow_ranks/case_*.py. A launch that
fails shows each failing case with the rank it failed on.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import launch_alone, launch_ranks
from launches import JOBS, MERGED, Job

pytestmark = pytest.mark.distributed

LIMIT = 1200.0  # seconds a launch may take; the longest needs half of it on two idle cores


def as_name(job: Job) -> str:
    """For example torch-gloo-3-checkpoint+18, by the first case file and the number of others."""
    parts = [job.framework, job.controller, str(job.ranks), f"{job.cases[0]}+{len(job.cases) - 1}"]
    parts += ["hosts"] if job.hosts else []
    parts += ["dynamic"] if job.hosts and job.settings else []
    return "-".join(parts)


def marks_of(job: Job) -> list[pytest.MarkDecorator]:
    """Return a launch's tiers, and its order in the fast tier: long launches come first.

    Those of one process are last, the longer one at the end: another worker can take it.
    """
    is_longer = job.framework == "tensorflow"
    order = 3 + is_longer if job.ranks == 1 else 2 - is_longer - (job.tiers == MERGED)
    return [pytest.mark.tiers(*job.tiers), pytest.mark.long(order)]


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=marks_of(job), id=as_name(job)) for job in JOBS]
)
def test_cases_pass_on_every_rank(job: Job, tier: str, tmp_path: Path) -> None:
    part = job.part(tier)
    if job.controller == "alone":
        done = launch_alone(job.files(tier), folder=tmp_path, limit=LIMIT, tier=part)
    else:
        done = launch_ranks(
            job.files(tier),
            size=job.ranks,
            controller=job.controller,
            folder=tmp_path,
            limit=LIMIT,
            settings=job.settings,
            hosts=job.hosts,
            tier=part,
        )
    done.assert_all_passed(job.ranks)
    done.assert_clean()
