"""Settings can be copied and sent to other processes; what is owed stays where it is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from horovod_topk.schedules import Accordion

ddp = pytest.importorskip("horovod_topk.ddp")

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda compression: pickle.loads(pickle.dumps(compression)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_has_the_settings_and_no_optimizer(
    framework: str, copied: Callable[[Any], Any]
) -> None:
    pytest.importorskip(framework)
    pytest.importorskip(f"horovod.{framework}")
    module = pytest.importorskip(f"horovod_topk.{framework}")
    made = module.TopKEF({"head.*": "dense", "*": 0.02}, values="int8", warmup=5, name="x")
    again = copied(made)
    assert type(again) is type(made)
    assert again.config == made.config
    assert not again._living_states()


def test_a_deep_copy_has_the_same_scaler() -> None:
    """A copied one would never hear of a change of the scale."""
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("horovod_topk.ddp")
    scaler = torch.amp.GradScaler("cpu")
    copied = copy.deepcopy({"compression": module.TopKEF(grad_scaler=scaler)})
    assert copied["compression"].grad_scaler is scaler
    both = copy.deepcopy({"scaler": scaler, "compression": module.TopKEF(grad_scaler=scaler)})
    assert both["compression"].grad_scaler is both["scaler"]


# `repr` returns the call that makes a compressor. Compressors whose rules are functions are copied.


def is_convolution(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 4


def starts_with(text: str, name: str, shape: tuple[int, ...], *, lower: bool = False) -> bool:
    return (name.lower() if lower else name).startswith(text)


@dataclass(frozen=True)
class Deeper:
    """A rule that says itself what it equals."""

    than: int

    def __call__(self, name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) > self.than


@pytest.mark.parametrize(
    "rule", [is_convolution, partial(starts_with, "head", lower=True), Deeper(2), str.isidentifier]
)
@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_rules_that_are_functions_are_copied_with_equal_settings(
    way: Callable[[Any], Any], rule: Any
) -> None:
    made = ddp.TopKEF(ratio={rule: 0.02, "head.*": "dense"})
    assert way(made).config == made.config
    assert hash(way(made).config) == hash(made.config)


@pytest.mark.parametrize(
    "text",
    [
        "TopKEF()",
        "TopKEF(ratio=0.01)",
        "TopKEF(ratio=1.0)",
        "TopKEF(values='int8', warmup=((500, 0.25), (1000, 0.05)), momentum=(0.9, 'nesterov'))",
        "TopKEF(warmup=None, guard=Guard(nonfinite=5))",
        "TopKEF(guard=None, momentum=0.0, follow_lr=True)",
        "TopKEF(ratio={'head.*': 1.0, is_convolution: 0.02})",
        "TopKEF(ratio={is_convolution: 0.5, '*': (0.1, 0.2)}, exchange='sharded')",
        "TopKEF(values=('int8', 'plain'))",
        "QSGD(bits=2, momentum='auto', ratio={'head.*': 1.0})",
        "TopKEF(schedule=Accordion(critical=0.2))",
        "QSGD(bits=2)",
        "PowerSGD(rank=2, exchange='allreduce')",
    ],
)
def test_repr_is_the_call_with_what_differs_from_the_defaults(text: str) -> None:
    names = {name: getattr(ddp, name) for name in ("TopKEF", "QSGD", "PowerSGD", "Guard")}
    known = names | {"is_convolution": is_convolution, "Accordion": Accordion}
    made, again = eval(text, known), eval(repr(eval(text, known)), known)
    assert (again.config, again.deferred) == (made.config, made.deferred)
    assert sorted(repr(made)) == sorted(text)  # the order of settings is that of the signature
