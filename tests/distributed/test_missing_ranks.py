"""A rank that waits for others in vain says so, and raises at the limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from horovod_topk.core.exchange.meeting import VARIABLE
from launcher import HOROVODRUN, TORCHRUN, run

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parent / "missing_ranks" / "train.py"
COMMANDS = {
    "horovod": [*HOROVODRUN, "--gloo", "-np", "2", sys.executable, str(SCRIPT), "horovod"],
    "ddp": [*TORCHRUN, "--nproc-per-node=2", str(SCRIPT), "ddp"],
}


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "who"), [("horovod", "some other rank"), ("ddp", "rank 1")])
def test_one_rank_that_compresses_alone(adapter: str, who: str, tmp_path: Path) -> None:
    done = run(COMMANDS[adapter], tmp_path, 90.0, {VARIABLE: "3"})
    assert done.returncode not in (0, None), done.describe()
    said = f"rank 0 waited 3 s in 'topkef.agreement', to which {who} did not come"
    assert f"MissingRanksError: {said}" in done.output
    assert not done.immortal
