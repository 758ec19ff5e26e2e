"""Cases that are meant to go wrong, to prove that the launcher and the ranks' meeting notice."""

from __future__ import annotations

import time

import horovod.torch as hvd
import pytest
import torch


def test_only_rank_one_fails() -> None:
    assert hvd.rank() != 1, "deliberate failure on rank 1"


def test_ranks_go_on_after_a_failure() -> None:
    assert hvd.allreduce(torch.ones(1), name="after", op=hvd.Sum) == 2


@pytest.mark.timeout(5)  # no rank can pass it
def test_one_rank_never_joins_a_collective() -> None:
    if hvd.rank() == 1:
        time.sleep(600)
    hvd.allreduce(torch.ones(1), name="never")
