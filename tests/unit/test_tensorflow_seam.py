"""The canary for TensorFlow; see test_seam.py."""

from __future__ import annotations

from typing import Any

import pytest
from oracle.canary import HOROVOD, Function, functions, inspect_import

SEAM = {
    "horovod.tensorflow._make_allreduce_grads_fn",
    "horovod._keras.create_distributed_optimizer",
    "horovod.tensorflow.join",
}

FILES = (
    "tensorflow/__init__.py",
    "tensorflow/mpi_ops.py",
    "tensorflow/gradient_aggregation.py",
    "tensorflow/gradient_aggregation_eager.py",
    "_keras/__init__.py",
)

# What we rely on in each, for whoever meets a failure here.
RELIED_ON = {
    "_make_allreduce_grads_fn": "is where every gradient meets its variable; we answer for ours",
    "_DistributedGradientTape.__init__": "looks _make_allreduce_grads_fn up for every tape",
    "_DistributedGradientTape.gradient": "calls it with gradients, variables, use_generic_names",
    "_DistributedOptimizer.__init__": "looks it up for TensorFlow 1's optimizers",
    "_DistributedOptimizer.compute_gradients": "calls it with gradients and variables",
    "LocalGradientAggregationHelper._allreduce_grads_helper": "calls it in a condition",
    "LocalGradientAggregationHelperEager._allreduce_helper": "calls it in a condition",
    "create_distributed_optimizer": "looks it up in the constructor, and is blind to Keras 3",
    "join": "is looked up as horovod.tensorflow.join by users",
    "allgather": "takes a name, ignore_name_scope and a process set",
}

DIGESTS = {
    "_make_allreduce_grads_fn": "184d62245dad0f33",
    "_DistributedGradientTape.__init__": "143b58e1a85bb84a",
    "_DistributedGradientTape.gradient": "bb39b698dff858dc",
    "_DistributedOptimizer.__init__": "3c63ae435a41fa5d",
    "_DistributedOptimizer.compute_gradients": "10c69f1115b4dbbe",
    "LocalGradientAggregationHelper._allreduce_grads_helper": "b927fc7e7163bbb3",
    "LocalGradientAggregationHelperEager._allreduce_helper": "f9f15b25dda89b59",
    "create_distributed_optimizer": "c706a7e373c437d9",
    "join": "f9e205bcc53b9e6f",
    "allgather": "2b12a5a59f235644",
}


def texts() -> dict[str, str]:
    return {name: (HOROVOD / name).read_text() for name in FILES}


def changes(found: dict[str, Function]) -> list[str]:
    """What differs from Horovod 0.28.1, with what to look at."""
    return [
        f"{name}: check that it still {relied_on}"
        for name, relied_on in RELIED_ON.items()
        if name not in found or found[name].digest != DIGESTS[name]
    ]


def test_horovod_is_as_the_seam_expects() -> None:
    report = changes(functions(*texts().values()))
    assert not report, (
        "Horovod differs from 0.28.1 where horovod_topk hooks into it. Read each function below, "
        "adapt horovod_topk/tensorflow/, run tests/distributed, and only then update this file:"
        "\n  " + "\n  ".join(report)
    )


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        (0, "groups = vars_to_refs(groups)", "groups = list(groups)", "_make_allreduce_grads_fn"),
        (0, "_allreduce_grads(rg, rs, use_generic_names)", "_reduce(rg)", "Tape.gradient"),
        (1, "def join(", "def leave(", "join: "),
        (3, "self.allreduce_grads(rg, rv)", "self.reduce(rg)", "Eager._allreduce_helper"),
        (4, "hvd._make_allreduce_grads_fn(", "make(", "create_distributed_optimizer"),
    ],
)
def test_canary_notices_a_change(file: int, old: str, new: str, expected: str) -> None:
    changed = texts()
    assert old in changed[FILES[file]]
    changed[FILES[file]] = changed[FILES[file]].replace(old, new)
    assert any(expected in line for line in changes(functions(*changed.values())))


@pytest.fixture(scope="module")
def inspection() -> dict[str, Any]:
    modules = ("", ".keras", ".functions", ".elastic", ".gradient_aggregation")
    return inspect_import(
        "horovod_topk.tensorflow.seam",
        "horovod.tensorflow._make_allreduce_grads_fn",
        *(f"horovod.tensorflow{name}" for name in modules),
        "horovod._keras",
    )


def test_import_patches_the_seam_and_nothing_else(inspection: dict[str, Any]) -> None:
    assert set(inspection["import"]) == SEAM
    assert inspection["checked"] > 300  # Horovod was really looked at
    assert inspection["install"] == []
    assert inspection["unwraps"]
    assert inspection["names"] == ["_make_allreduce_grads_fn", True]
