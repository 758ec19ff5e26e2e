"""Every option of torch.optim's SGD, Adam and AdamW, as the table in docs/settings.md says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.updates import Exact
from torch import Tensor, nn

import training
import world
from case_updates import DECAY, auto, making
from horovod_topk.errors import TopKError
from horovod_topk.torch_training.gradients import local
from plain import PlainTopKEF as TopKEF
from training import Setup, Task
from witness import assert_ranks_equal

SETTINGS = Path(__file__).parents[3] / "docs" / "settings.md"
DOUBLE, NARROW, HALF = torch.float64, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        outcome: "adapted"; "corrected": the optimizer's own step, corrected; "left", with a
            warning that has `shown`; "own": the optimizer's own step, without a warning; "error",
            with `shown`.
        kinds: of optimizers.
        given: options of the optimizer.
        build: makes the task.
        groups: makes parameter groups of the task.
        shown: part of the warning or error.
    """

    outcome: str
    kinds: tuple[str, ...] = ("SGD", "Adam", "AdamW")
    given: dict[str, Any] = field(default_factory=dict)
    build: Callable[[], Task] = training.perceptron
    groups: Callable[[Task], Any] = lambda task: task.parameters()
    shown: str = ""


def of_dtype(kind: torch.dtype) -> Any:
    return lambda: training.perceptron(kind)


class Complex(Task):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 5, dtype=torch.complex64))

    def loss(self, rank: int, step: int) -> Tensor:
        return (self.weight - 1).abs().square().sum()


def halves(**options: Any) -> Any:
    """Two groups, of which the second has these options."""

    def groups(task: Task) -> Any:
        first, *rest = task.parameters()
        return [{"params": [first]}, {"params": rest, **options}]

    return groups


ADAMS = "Adam", "AdamW"
ROWS = {
    "lr, weight_decay": Row("adapted"),
    "lr as a tensor": Row("adapted", given={"lr": torch.tensor(0.02), "foreach": False}),
    "weight_decay as a tensor": Row("adapted", ("SGD",), {"weight_decay": torch.tensor(DECAY)}),
    "decoupled_weight_decay": Row("adapted", ("Adam",), {"decoupled_weight_decay": True}),
    "nesterov": Row("adapted", ("SGD",), {"nesterov": True}),
    "maximize": Row("adapted", given={"maximize": True}),
    "amsgrad": Row("adapted", ADAMS, {"amsgrad": True}),
    "foreach": Row("adapted", given={"foreach": True}),
    "fused": Row("adapted", given={"fused": True}),
    "capturable": Row("adapted", ADAMS, {"capturable": True}),
    "betas as tensors": Row(
        "adapted",
        ADAMS,
        {"betas": (torch.tensor(0.5), torch.tensor(0.99)), "lr": torch.tensor(0.02)},
    ),
    "betas[1] = 0": Row("adapted", ADAMS, {"betas": (0.5, 0.0)}),
    "eps": Row("adapted", ADAMS, {"eps": 1e-3}),
    "momentum = 0": Row("own", ("SGD",), {"momentum": 0.0}),
    "betas[0] = 0": Row("corrected", ADAMS, {"betas": (0.0, 0.99)}),
    "dampening": Row("left", ("SGD",), {"dampening": 0.1}, shown="it is dampened"),
    "differentiable": Row("left", given={"differentiable": True}, shown="it is differentiable"),
    "eps = 0": Row("error", ADAMS, {"eps": 0.0}, shown="eps=0.0, which is 0 in torch.float32"),
    "groups with options of their own": Row("adapted", groups=halves(lr=0.01, maximize=True)),
    "float64 parameters": Row("adapted", build=of_dtype(DOUBLE)),
    "bfloat16 parameters": Row("adapted", build=of_dtype(NARROW)),
    "float16 parameters": Row("adapted", build=of_dtype(HALF), given={"fused": True}),
    "float16 parameters, eps below 3e-8": Row(
        "error", ADAMS, build=of_dtype(HALF), shown="eps=1e-08, which is 0 in torch.float16"
    ),
    "complex parameters": Row("error", build=Complex, shown="complex64 cannot be compressed"),
    "channels_last parameters": Row("adapted", build=training.convolution),
    "parameters that are not contiguous": Row("adapted", build=training.Transposed),
    "sparse gradients": Row("adapted", build=training.Embedded),
}
MARKS = {
    "sparse gradients": pytest.mark.horovod,
    "channels_last parameters": pytest.mark.whole,
    "parameters that are not contiguous": pytest.mark.whole,
}
CASES = [
    pytest.param(row, kind, marks=[MARKS[name]] if name in MARKS else [], id=f"{name}-{kind}")
    for name, row in ROWS.items()
    for kind in row.kinds
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("row", "kind"), CASES)
def test_each_option_does_what_the_table_says(row: Row, kind: str) -> None:
    # A tensor of a learning rate is written to.
    options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in row.given.items()}
    setup = Setup(row.build, making(kind, **options), parameter_groups=row.groups)
    task = setup.task()
    if row.outcome == "error":
        with pytest.raises(TopKError, match=re.escape(row.shown)):
            setup.distributed(task, auto())
        return
    twin = setup.task()
    dense, optimizer = setup.optimizer(row.groups(twin)), setup.distributed(task, auto())
    dense.defaults["differentiable"] = False
    named = dict(task.named_parameters())
    exact = {name: Exact(p) for name, p in named.items()}
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    kinds = {p.dtype for p in named.values()}
    near = 1e-9 if DOUBLE in kinds else 0.2 if kinds & {NARROW, HALF} else 1e-4
    raises = "differentiable" in options and world.CONTROLLER == "torchrun"
    if raises:  # PyTorch's own step cannot write to parameters then; Horovod's does not know of it
        with pytest.raises(RuntimeError, match="leaf"):
            training.ordinary(task, optimizer, 0)
    for step in range(0 if raises else 6):
        if isinstance(options.get("lr"), Tensor):
            optimizer.param_groups[0]["lr"].mul_(0.5)  # read in every step
            dense.param_groups[0]["lr"].mul_(0.5)
        training.ordinary(task, optimizer, step)
        if row.outcome == "adapted":
            factors = TopKEF.of(optimizer).state_dict()["state.factors"]["residuals"]
            for name, p in named.items():
                gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
                own = group_of[p], gradient, factors[name].expand(2), 0.5
                exact[name].step(*own)
                expected = torch.tensor(exact[name].p, dtype=p.dtype)
                torch.testing.assert_close(local(p).detach(), expected, rtol=near, atol=near / 10)
            continue
        if row.outcome == "corrected":
            continue
        for p, other in zip(task.parameters(), twin.parameters(), strict=True):
            other.grad = p.grad.clone()
        dense.step()
        for p, other in zip(task.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, other) and p.isfinite().all()
    assert_ranks_equal(task.parameters())
    stats = TopKEF.of(optimizer).stats()
    assert len(stats.warnings) == int(row.outcome == "left")
    assert stats.steps == 6 or raises
    assert all(row.shown in warning for warning in stats.warnings)
    update_rule = TopKEF.of(optimizer)._compressor.plan.update_rule
    name = {"SGD": "sgd"}.get(kind, "adam")
    rules = {"adapted": name, "corrected": "own"}
    assert (update_rule and update_rule.name) == rules.get(row.outcome)


def test_the_table_has_every_row() -> None:
    words = {
        "adapted": "adapted",
        "corrected": "corrected",
        "left": "left",
        "own": "own step",
        "error": "error",
    }
    table = SETTINGS.read_text().split("## Options of SGD, Adam and AdamW")[1].split("\n## ")[0]
    found = re.findall(r"^\| ([^|]+) \| ([^|]+) \| \*\*([^*]+)\*\*", table, re.M)
    names = {name.replace("`", ""): (kinds, outcome) for name, kinds, outcome in found}
    shown = {"SGD, Adam, AdamW": "all"}
    expected = {
        name: (shown.get(", ".join(row.kinds), ", ".join(row.kinds)), words[row.outcome])
        for name, row in ROWS.items()
    }
    assert names == expected
