"""Ratios that some parameters have of their own, between real ranks."""

from __future__ import annotations

from typing import Any

import pytest

import training
from horovod_topk.errors import ConfigError, PlanMismatchError
from plain import PlainTopKEF as TopKEF
from training import Setup
from world import hvd

RULES = {"net.3.*": "dense", lambda name, shape: shape == (33, 20): 0.3, "*": 0.05}
PLAIN = Setup(optimizer=training.plain_sgd)


def grouped(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": RULES, "min_numel": 0, **settings})


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("odd", [{"net.3.weight": 0.5}, {}], ids=["another", "none"])
def test_ranks_that_differ_are_told_of_which_tensor(odd: Any) -> None:
    last = hvd.size() - 1
    rules = odd if hvd.rank() == last else {"net.3.weight": 0.25}
    with pytest.raises(PlanMismatchError, match="ranks disagree on ratios:") as raised:
        PLAIN.distributed(PLAIN.task(), grouped(ratio={**rules, "*": 0.05}))
    assert '["net.3.weight", 0.25] on rank' in str(raised.value)
    assert f'["net.3.weight", {0.5 if odd else 0.05}] on rank {last}' in str(raised.value)


def test_a_pattern_that_matches_no_parameter_is_refused() -> None:
    task = PLAIN.task()
    with pytest.raises(ConfigError, match=r"'head\.\*' matches none of 6 tensors"):
        PLAIN.distributed(task, grouped(ratio={"head.*": "dense"}))


def test_frozen_parameters_may_be_named() -> None:
    task = PLAIN.task()
    parameters = dict(task.named_parameters())
    parameters["net.0.weight"].requires_grad_(False)
    optimizer = PLAIN.distributed(task, grouped(ratio={"net.0.*": 0.5, "*": 0.05}))
    training.ordinary(task, optimizer, 0)
    assert TopKEF.of(optimizer).stats().ratios == {"net.0.bias": 0.5}
