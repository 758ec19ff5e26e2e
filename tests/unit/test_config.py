"""Settings: what is accepted, and what each refusal says (value, limit, cure)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from oracle.schedules import ByGradient

from horovod_topk.config import (
    OPTIONAL,
    check_settings,
    check_whole,
    fields_of,
    reject_unknown,
    settings_of,
)
from horovod_topk.errors import ConfigError, TopKError, UnknownSettingError
from horovod_topk.guard import Guard
from horovod_topk.local.settings import LocalConfig, Outer
from horovod_topk.methods import QSGD, Method, RandomK
from horovod_topk.methods.bytegrad import ByteGrad
from horovod_topk.methods.powersgd import PowerSGD
from horovod_topk.methods.terngrad import TernGrad
from horovod_topk.methods.threshold import Threshold
from horovod_topk.methods.topk import TopK
from horovod_topk.schedules import Accordion, ByNetwork


def refusal(**setting: Any) -> str:
    """The message with which a setting is refused."""
    with pytest.raises(ConfigError) as caught:
        TopK(**setting)
    assert isinstance(caught.value, (TopKError, ValueError))
    return str(caught.value)


def test_values_are_unrounded_where_all_are_sent() -> None:
    assert TopK(ratio=1.0).values == "float32"
    assert TopK(ratio=1.0, values="int4").values == "int4"
    assert not TopK(ratio=1.0).withheld()
    assert TopK(ratio=0.5).at(1.0).values == "float32"


def test_the_automatic_warmup_sends_ten_times_as_much() -> None:
    assert TopK(warmup="auto").stretches == ((60, 0.2),)
    assert TopK(0.001, warmup="auto").stretches == ((60, 0.01),)
    assert TopK(0.1, warmup="auto").stretches == ((60, 0.25),)
    assert TopK(0.5, warmup="auto").warmup is None


def test_all_settings_are_agreed_between_ranks() -> None:
    names = [field.name for field in dataclasses.fields(TopK)]
    optional = {"momentum": 0.5, "nesterov": True, "follow_lr": True, "residuals": "int8"}
    optional |= {"ratios": (("w", 1.0),), "allocation": "adaptive"}
    optional |= {"guard": Guard(), "schedule": ByGradient()}
    everything = TopK(clip_norm=1.0, warmup=100, **optional)
    assert list(everything.agreed()) == names


def test_what_is_off_is_no_part_of_the_agreement() -> None:
    """Payloads are then those of a version that does not know it."""
    names = [field.name for field in dataclasses.fields(TopK)]
    assert list(TopK().agreed()) == [name for name in names if name not in OPTIONAL]
    assert all(getattr(TopK(), name) == off for name, off in OPTIONAL.items())


@pytest.mark.parametrize("ratio", [1, 1.0, 0.5, 1e-9, math.ulp(0.0)])
def test_ratios_within_the_limits(ratio: float) -> None:
    accepted = TopK(ratio=ratio).ratio
    assert accepted == ratio
    assert type(accepted) is float


KINDS = "'float32', 'float16', 'bfloat16', 'int8', 'int4', 'int3', 'int2', 'sign'"
SELECTIONS = "'exact', 'sampled'"
EXCHANGES = "'allgather', 'sharded', 'hierarchical', 'auto'"
SHARE = "Pass the share of elements to send, such as ratio=0.01"
FLOAT = "Pass a float in (0, 1], such as ratio=0.01."
WHOLE, NORM = "Pass 0 to compress every tensor", "such as clip_norm=1.0, or None"

# setting, values that are refused, what is wrong with them, and the cure
REFUSED: list[tuple[str, list[Any], str, str]] = [
    (
        "ratio",
        [0, 0.0, -0.5, -3, 1.0000001, 100.0, math.inf, math.nan],
        "lies outside (0, 1]",
        SHARE,
    ),
    ("ratio", ["0.01", None, True, False, [0.01], 1j], "is not a number", FLOAT),
    ("ratio", [2], "is above 1; ratio is the share", "For 2 times fewer elements pass ratio=0.5."),
    ("ratio", [100], "is above 1; ratio", "For 100 times fewer elements pass ratio=0.01."),
    ("ratio", [3], "is above 1; ratio", "For 3 times fewer elements pass ratio=0.333333."),
    ("min_numel", [-1, 1.0, True, None, "1024", math.nan], "is not a whole number of elem", WHOLE),
    (
        "clip_norm",
        [0, 0.0, -1.0, math.inf, math.nan, True, "1.0", [1.0]],
        "is not a number abo",
        NORM,
    ),
    ("name", ["", 3, b"generator", ["generator"]], "is not a non-empty", "the same on every rank"),
    *[
        ("values", [kind], "is not one", f"Did you mean {near!r}? Pass one of {KINDS}.")
        for kind, near in (
            ("float23", "float32"),
            ("float61", "float16"),
            ("bf16loat", "bfloat16"),
            ("int-8", "int8"),
            ("signs", "sign"),
        )
    ],
    (
        "exchange",
        ["all_gather"],
        "is not one",
        f"Did you mean 'allgather'? Pass one of {EXCHANGES}.",
    ),
    ("selection", ["exakt"], "is not one", f"Did you mean 'exact'? Pass one of {SELECTIONS}."),
    *[
        (name, [None, 32, "", ["float32"]], "is not one of the choices", "Pass one of '")
        for name in ("values", "exchange", "selection")
    ],
]


@pytest.mark.parametrize(("setting", "values", "problem", "cure"), REFUSED)
def test_values_that_are_refused(setting: str, values: list[Any], problem: str, cure: str) -> None:
    for value in values:
        message = refusal(**{setting: value})
        assert message.startswith(f"{setting}={value!r} {problem}")
        assert cure in message


@pytest.mark.parametrize("exchange", ["allgather", "hierarchical"])
def test_a_ratio_back_needs_owners_who_select(exchange: str) -> None:
    message = refusal(exchange=exchange, gather_ratio=0.1)
    assert message.startswith(f"ratio=(0.02, 0.1) was given with exchange={exchange!r}, in which ")
    assert "Pass ratio=0.02 alone, or exchange='sharded' or 'auto'" in message
    for other in ("sharded", "auto"):
        assert TopK(exchange=other, gather_ratio=0.1).ratio_back == 0.1


def whole(n: int) -> list[Any]:
    return [np.int64(n), np.uint8(n), np.array(n), torch.tensor(n)]


def number(x: float) -> list[Any]:
    return [np.float32(x), np.float64(x), Fraction(x)]


# what makes settings of a value; values of other packages, and the same as Python's
PLAIN: list[tuple[Callable[[Any], Any], list[Any], Any]] = [
    (lambda n: TopK(min_numel=n), whole(7), 7),
    (lambda n: TopK(warmup=n), whole(7), 7),
    (lambda n: TopK(warmup=[(n, 0.25)]), whole(7), 7),
    (lambda x: TopK(warmup=[(7, x)]), number(0.25), 0.25),
    (lambda x: TopK(x), number(0.25), 0.25),
    (lambda x: TopK(ratio=0.5, exchange="sharded", gather_ratio=x), number(0.25), 0.25),
    (lambda x: TopK(clip_norm=x, momentum=x, ratios=(("w", x),)), number(0.25), 0.25),
    (lambda n: RandomK(seed=n), whole(7), 7),
    (lambda n: PowerSGD(rank=n), whole(7), 7),
    (lambda n: QSGD(bits=n), whole(7), 7),
    (lambda n: ByteGrad(block=n), whole(64), 64),
    (lambda x: TernGrad(clip=x), number(2.5), 2.5),
    (lambda x: Threshold(threshold=x), number(2.5), 2.5),
    (lambda n: Guard(nonfinite=n, cool_down=n, trial_every=n), whole(70), 70),
    (lambda x: Guard(trend=x, residual=x, slower=x), number(2.5), 2.5),
    (lambda n: Accordion(window=n, profiles={0.5: {"min_numel": n}}), whole(7), 7),
    (lambda x: Accordion(critical=x, threshold=x), number(0.25), 0.25),
    (lambda x: ByNetwork(levels=(x,), budget=x), number(0.25), 0.25),
    (lambda n: LocalConfig(every=n, fragments=n, delay=n - 1), whole(7), 7),
    (lambda x: LocalConfig(decay=x, alpha=x, clip=x), number(0.25), 0.25),
    (lambda x: Outer(lr=x, momentum=x), number(0.25), 0.25),
]


def test_a_whole_number_is_returned_as_an_int() -> None:
    found = [check_whole("every", n, 1, 9, 3) for n in whole(7)]
    assert found == [7] * len(found) and {*map(type, found)} == {int}


@pytest.mark.parametrize(("make", "values", "same"), PLAIN)
def test_numbers_of_other_packages(
    make: Callable[[Any], Any], values: list[Any], same: Any
) -> None:
    """As Python's: ranks write settings as JSON, and checkpoints and reprs have them."""
    expected = make(same)
    for value in values:
        made = make(value)
        assert made == expected and repr(made) == repr(expected)
        assert json.dumps(dataclasses.asdict(made)) == json.dumps(dataclasses.asdict(expected))


def test_no_number_of_another_package_is_a_whole_number_by_chance() -> None:
    for value in (np.float64(7.0), np.bool_(True), np.array([7]), torch.tensor(7.0), Fraction(7)):
        assert "is not a whole number" in refusal(min_numel=value)


def test_a_norm_to_clip_to_is_a_float() -> None:
    assert type(TopK(clip_norm=2).clip_norm) is float


@pytest.mark.parametrize(
    ("keyword", "nearest"),
    [
        ("ration", "ratio"),
        ("value", "values"),
        ("min_elements", "min_numel"),
        ("exchnage", "exchange"),
        ("compression_ratio", "ratio"),
    ],
)
def test_an_unknown_keyword_suggests_the_nearest(keyword: str, nearest: str) -> None:
    with pytest.raises(UnknownSettingError) as caught:
        fields_of(TopK, {keyword: 1})
    message = str(caught.value)
    assert message.startswith(f"TopKEF has no setting {keyword!r}. Did you mean {nearest!r}? ")
    settings = ", ".join(sorted(settings_of(TopK)))
    assert f"The settings are {settings}." in message
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gather_ratio", "ratio=(0.01, 0.02)"),
        ("ratios", "ratio={'head.*': 'dense', '*': 0.01}"),
        ("indices", "values=('int8', 'plain')"),
        ("nesterov", "momentum=(0.9, 'nesterov')"),
        ("probe_every", "TopKEF.of(optimizer).probe(every=100)"),
        ("commit_dir", "TorchState(..., commit_dir=...)"),
        ("velocity_kept", "leave velocity_kept= out"),
    ],
)
def test_an_old_spelling_says_the_new_one(old: str, new: str) -> None:
    assert new in refused(old, 1)


def refused(name: str, value: object, method: type[Method] = TopK) -> str:
    with pytest.raises(ConfigError) as caught:
        check_settings(method, {name: value}, method.__name__)
    return str(caught.value)


def fields_given(name: str, value: object, **others: Any) -> dict[str, Any]:
    return fields_of(TopK, {name: value, **others})[0]


def test_one_setting_fills_several_fields() -> None:
    assert fields_given("ratio", (0.1, 0.2)) == {"ratio": 0.1, "gather_ratio": 0.2}
    rules = {"head.*": "dense", "body.*": 0.5}
    known = (("head.*", 1.0), ("body.*", 0.5))
    assert fields_given("ratio", rules) == {"ratios": known}
    assert fields_given("ratio", rules | {"*": 0.1}) == {"ratios": known, "ratio": 0.1}
    both = {"ratios": None, "ratio": 0.1, "gather_ratio": 0.2}
    assert fields_given("ratio", {"*": (0.1, 0.2)}) == both
    assert fields_given("ratio", {"*": "dense"}) == {"ratios": None, "ratio": 1.0}
    assert fields_given("values", ["int8", "plain"]) == {"values": "int8", "indices": "plain"}
    nesterovs = {"momentum": 0.9, "nesterov": True}
    assert fields_given("momentum", (0.9, "nesterov")) == nesterovs


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ratio", (0.1, 2), "ratio[1]=2 is above 1"),
        ("ratio", (0.1, 0.2), "ratio=(0.1, 0.2) was given with exchange='allgather'"),
        (
            "values",
            ("int8", "pakced"),
            "values[1]='pakced' is not one of the choices. Did you mean",
        ),
        (
            "momentum",
            (0.9, "heavy"),
            "momentum=(0.9, 'heavy') is no pair of a number and 'nesterov'",
        ),
        (
            "momentum",
            (0, "nesterov"),
            "momentum=(0.0, 'nesterov') is Nesterov's form of no momentum",
        ),
        ("momentum", ("auto", "nesterov"), "and set nesterov=True in the optimizer"),
    ],
)
def test_pairs_that_are_none(name: str, value: object, message: str) -> None:
    assert message in refused(name, value)


def test_a_ratio_that_the_method_has_not() -> None:
    assert "was given to QSGD, which has no ratio for all tensors" in refused("ratio", 0.1, QSGD)
    check_settings(QSGD, {"ratio": {"head.*": "dense"}})
    message = refused("ratio", (0.1, 0.2), RandomK)
    assert message.endswith("Pass one number, such as ratio=0.1.")


def test_a_keyword_like_no_other_gets_the_list() -> None:
    with pytest.raises(UnknownSettingError, match=r"'zzz'\. The settings are a, b\."):
        reject_unknown(["zzz"], ["b", "a"])
    reject_unknown([], ["a"])
