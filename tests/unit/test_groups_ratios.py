"""Ratios that some tensors have of their own: what is accepted, and what a plan makes of it."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from horovod_topk import cli
from horovod_topk.core.control.schedule import Schedule
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.plan.shards import shard, shard_sums
from horovod_topk.errors import ConfigError
from horovod_topk.methods.topk import TopK
from horovod_topk.ratios import Predicate, checked_rules, made_again

EMBEDDING = TensorSpec("embedding.weight", (200, 100), "float32")
BODY = TensorSpec("body.0.weight", (100, 100), "float32")
BIAS = TensorSpec("body.0.bias", (100,), "float32")
HEAD = TensorSpec("head.weight", (50, 100), "float32")
SPECS = [EMBEDDING, BODY, BIAS, HEAD]
RULES = {"embedding.*": 0.001, "head.*": "dense"}


def plan_of(ratios: object = None, specs: list[TensorSpec] = SPECS, **settings: Any) -> Plan:
    given = {"ratio": 0.01, "values": "float32", **settings}
    return make_plan(specs, TopK(ratios=checked_rules(ratios), **given))


def sent(plan: Plan) -> dict[str, int]:
    return {tensor.spec.name: tensor.k for tensor in plan.tensors()}


def refusal(ratios: object) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(ratios)
    return str(caught.value)


# Which rule wins


def test_each_tensor_sends_the_share_that_is_its_own() -> None:
    plan = plan_of(RULES)
    assert sent(plan) == {EMBEDDING.name: 20, BODY.name: 100, BIAS.name: 100, HEAD.name: 5000}
    assert [t.spec.name for t in plan.tensors() if t.index is None] == [BIAS.name, HEAD.name]


@pytest.mark.parametrize(
    "ratios",
    [
        RULES,
        list(RULES.items()),
        (("embedding.*", 0.001), ["head.*", 1]),
        {"*embed*": 0.001, lambda name, shape: shape == (50, 100): 1.0},
        {"embedding.weight": 0.001, "[gh]ead.w?ight": "dense", "*": 0.01},
    ],
    ids=["mapping", "pairs", "sequences", "predicate", "wildcards"],
)
def test_rules_that_say_the_same_make_the_same_plan(ratios: object) -> None:
    assert plan_of(ratios) == plan_of(RULES)
    assert plan_of(ratios).digest == plan_of(RULES).digest


def test_the_first_that_holds_wins() -> None:
    assert sent(plan_of({"head.*": 0.5, "*": 0.1}))[HEAD.name] == 2500
    assert sent(plan_of({is_matrix: 0.1, "*": 0.5}))[HEAD.name] == 500


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


def test_small_tensors_are_dense_in_any_case() -> None:
    assert plan_of({"*.bias": 0.5}) == plan_of()
    assert sent(plan_of({"*.bias": 0.5}, min_numel=100))[BIAS.name] == 50


def test_a_pattern_may_match_what_takes_no_part() -> None:
    """Frozen parameters, and variables whose gradients are sparse or absent."""
    names = ["frozen.weight", *(spec.name for spec in SPECS)]
    config = TopK(ratios=(("frozen.*", 0.5), ("head.*", 1.0)), ratio=0.01, values="float32")
    assert make_plan(SPECS, config, names=names) == plan_of({"head.*": "dense"})


# What a plan says


def test_without_rules_nothing_changes() -> None:
    for nothing in (None, {}, [], ()):
        assert plan_of(nothing) == make_plan(SPECS, TopK(ratio=0.01, values="float32"))
    assert make_plan(SPECS, TopK(ratio=0.01, values="float32")).digest.hex() == "65cb292f31a676d8"
    assert (
        make_plan(SPECS, TopK(ratio=0.01, values="float32")).buckets[0].digest.hex()
        == "5842bcf6a0ecd787"
    )


def test_rules_that_change_nothing_are_off() -> None:
    assert plan_of({"*": 0.01}) == plan_of()
    other = {"exchange": "sharded", "gather_ratio": 0.05}
    assert plan_of({"head.*": 0.01}, **other).digest != plan_of(**other).digest


def test_buckets_of_other_ratios_have_other_digests() -> None:
    digests = {plan_of(ratios).buckets[0].digest for ratios in (None, RULES, {"head.*": 0.5})}
    assert len(digests) == 3


def test_a_plan_says_what_is_dense_and_why() -> None:
    plan = plan_of(RULES)
    assert plan.sent_dense() == {
        BIAS.name: "100 elements, fewer than min_numel=1024: sent dense",
        HEAD.name: "at its ratio of 1.0 entries cost no less: sent dense",
    }
    assert plan.own_ratios() == {EMBEDDING.name: 0.001, HEAD.name: 1.0}
    assert plan.summary().endswith("sent dense, 2 at ratios of their own")
    assert "own" not in plan_of().summary()


def test_a_tensor_less_keeps_the_ratios_of_the_others() -> None:
    assert sent(plan_of(RULES).without(BODY.name)) == {
        name: k for name, k in sent(plan_of(RULES)).items() if name != BODY.name
    }


def test_a_bucket_minds_the_ratios_of_its_own_tensors_alone() -> None:
    config = TopK(ratios=checked_rules(RULES), ratio=0.01, values="float32")
    both = make_plan(SPECS, config, groups=[[EMBEDDING], [BODY, BIAS], [HEAD]])
    one = make_plan(SPECS, replace(config, ratios=(("head.*", 1.0),)), groups=[[EMBEDDING]])
    assert (
        both.buckets[1].digest
        == make_plan([BODY, BIAS], TopK(ratio=0.01, values="float32")).buckets[0].digest
    )
    assert both.buckets[0].digest != one.buckets[0].digest
    assert "head.weight" not in both.without(HEAD.name).own_ratios()


@pytest.mark.parametrize("direction", ["scatter", "gather"])
def test_owners_send_the_same_share(direction: str) -> None:
    plan = plan_of(RULES, exchange="sharded", gather_ratio=0.1)
    total = dict.fromkeys(sent(plan), 0)
    for part in getattr(shard(plan.buckets[0], 2), direction):
        for tensor in part.tensors:
            total[tensor.spec.name] += tensor.k
    assert total[HEAD.name] == 5000
    assert 20 <= total[EMBEDDING.name] <= 22
    assert total[BODY.name] == pytest.approx(100 if direction == "scatter" else 1000, abs=2)


def test_so_do_owners_of_nodes() -> None:
    split = shard_sums(plan_of(RULES).buckets[0], Nodes(((0, 1), (2, 3))))
    assert sum(p.tensors[3].k for p in split.sums) == 5000
    assert 20 <= sum(p.tensors[0].k for p in split.sums) <= 22


def test_a_level_is_the_least_that_a_tensor_sends() -> None:
    plan = plan_of({"embedding.*": 0.001, "head.*": 0.5}, warmup=((10, 0.25), (20, 0.6)))
    schedule = Schedule(plan.config)
    shares = {ratio: sent(plan.under(schedule.settings(ratio))) for ratio in schedule.levels}
    assert {ratio: ks[EMBEDDING.name] for ratio, ks in shares.items()} == {
        1.0: 20_000,
        0.6: 12_000,
        0.25: 5_000,
        0.01: 20,
    }
    assert [ks[HEAD.name] for ks in shares.values()] == [5000, 3000, 2500, 2500]
    assert plan.under(schedule.settings(0.25)).own_ratios() == {HEAD.name: 0.5}


def test_one_is_refused_where_it_would_not_send_all() -> None:
    schedule = Schedule(plan_of({"embedding.*": 0.5}, ratio=1.0).config)
    with pytest.raises(ConfigError, match=r"own, at which 'embedding.weight' sends 0.5 of its"):
        schedule.check(1.0)
    Schedule(plan_of({"embedding.*": 0.5}).config).check(1.0)


# Refusals


def test_a_pattern_that_matches_nothing() -> None:
    message = refusal({"haed.*": "dense"})
    assert message.startswith("ratio: the pattern 'haed.*' matches none of 4 tensors. ")
    assert "names such as 'head.weight', " in message


def test_a_pattern_that_comes_too_late() -> None:
    message = refusal({"*.weight": 0.1, "head.*": "dense"})
    assert message.startswith("ratio: all that the pattern 'head.*' matches, 'head.weight' for ")
    assert message.endswith("Pass it before that one, or leave it out.")


NO_PATTERN = "is neither a pattern of names nor a predicate."
NO_RULES = "is neither a mapping nor pairs (pattern, ratio)"
NO_RATIOS: list[tuple[Any, str]] = [
    (0.0, "=0.0 lies outside (0, 1]"),
    (1.5, "=1.5 lies outside (0, 1]"),
    (100, "=100 is above 1; ratio['head.*'] is the share of elements sent, not the"),
    (float("nan"), "=nan lies outside (0, 1]"),
    (True, "=True is not a number"),
    (None, "=None is not a number"),
    ("all", "='all' is neither a number nor 'dense'"),
]


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        *(([(p, 0.5)], f"ratio: {p!r} {NO_PATTERN}") for p in (3, None, ("head", "body"), 0.5)),
        *(({"head.*": ratio}, f"ratio['head.*']{problem}") for ratio, problem in NO_RATIOS),
        *(
            (each, f"ratio={each!r} {NO_RULES}")
            for each in ("head.*=dense", 0.5, [0.5], ["ab"], [("head.*",)], {"head.*"})
        ),
    ],
)
def test_what_is_no_set_of_rules(ratios: object, message: str) -> None:
    assert refusal(ratios).startswith(message)


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_a_predicate_that_says_neither_yes_nor_no(answer: object) -> None:
    def unsure(name: str, shape: tuple[int, ...]) -> Any:
        return answer

    message = refusal({unsure: 0.5})
    assert message.startswith("tensor 'embedding.weight': ratio: predicate ")
    assert f"unsure said {answer!r} of shape [200, 100], which is neither True nor" in message


# Settings that are evaluated again


def test_the_same_function_again_makes_equal_settings() -> None:
    """Tapes find what they keep by their settings."""
    first, second = (
        TopK(ratios=checked_rules({longer(2): 0.5}), ratio=0.01, values="float32") for _ in range(2)
    )
    assert first == second
    assert hash(first) == hash(second)
    assert first != TopK(ratios=checked_rules({longer(3): 0.5}), ratio=0.01, values="float32")


def longer(than: int) -> Callable[[str, tuple[int, ...]], bool]:
    return lambda name, shape: len(shape) > than


def listed(names: list[str]) -> Callable[[str, tuple[int, ...]], bool]:
    return lambda name, shape: name in names


def test_functions_that_may_differ_do() -> None:
    names = ["a"]
    assert Predicate(listed(names)) != Predicate(listed(names))
    same = listed(names)
    assert Predicate(same) == Predicate(same) != "a"
    assert hash(Predicate(same)) == hash(Predicate(same))


@pytest.mark.parametrize(
    ("again", "found"),
    [
        ([(listed(["a"]), 0.5), ("b*", 0.1)], True),
        ([(listed(["c"]), 0.5), ("b*", 0.1)], True),  # that cannot be told, either
        ([(listed(["a"]), 0.4), ("b*", 0.1)], False),
        ([(listed(["a"]), 0.5), ("c*", 0.1)], False),
        ([(listed(["a"]), 0.5)], False),
        ([(longer(2), 0.5), ("b*", 0.1)], False),
        ([(partial(operator.contains, ["a"]), 0.5), ("b*", 0.1)], False),
        (None, False),
    ],
)
def test_rules_made_again_are_recognised(again: Any, found: bool) -> None:
    before = checked_rules([(listed(["a"]), 0.5), ("b*", 0.1)])
    rules = checked_rules(again)
    assert made_again(before, before) is None
    assert made_again(rules, before) is (rules[0][0] if rules and found else None)
    one, other = (checked_rules({partial(operator.contains, ["a"]): 0.5}) for _ in range(2))
    assert one is not None and made_again(one, other) is one[0][0]  # objects, too


# The command


def test_bytes_of_a_model_with_ratios_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({spec.name: spec.shape for spec in SPECS}))
    found = {}
    for ratios in ([], ["--ratios", "head.*=dense"], ["--ratios", "head.*=dense", "emb*=0.5"]):
        command = ["bytes", "--model", str(path), "--ratio", "0.01", "--ranks", "2", *ratios]
        assert cli.main(command) == 0
        head, _, table = capsys.readouterr().out.partition("\nexchange ")
        found[len(ratios)] = int(table.splitlines()[3].split()[2].replace(",", ""))
    assert "ratio 0.01, head.*=dense, emb*=0.5" in " ".join(head.split())
    assert found[2] - found[0] == pytest.approx(4 * (5000 - 50) - 60, abs=20)
    assert found[3] - found[2] > 4 * (10_000 - 200)


def test_a_plan_says_its_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--compute", "10ms", "--json", "--ratios", "0=dense"]) == 0
    assert json.loads(capsys.readouterr().out)["ratios"] == {"0": 1.0}
