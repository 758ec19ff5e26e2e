"""State dicts and statistics of several optimizers of one model, without ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_topk.core.exchange.selection import check_owners
from horovod_topk.core.run.stats import Stats, StepCounters, in_all
from horovod_topk.core.state.state_dict import of_several, shared_out
from horovod_topk.errors import ConfigError
from horovod_topk.metrics import JsonLines


def state(*names: str, committed: int, owned: bool = False, **more: Any) -> dict[str, Any]:
    arrays = {"shapes": {name: [1] for name in names}, "residuals": {name: name for name in names}}
    own = {"owned": {**arrays, "rank": 1, "ranks": 2}} if owned else {}
    return {"version": 1, "ratio": 0.01, **arrays, **own, "committed": committed, **more}


def test_each_optimizer_gets_its_own_part_back() -> None:
    first = state("a", "b", committed=5, owned=True, rates={"a": 0.1, "b": 0.1}, asked=0.5)
    second = state("c", committed=2, rates={"c": 0.3}, guard=[1.0])
    whole = of_several([(first, 6), (second, 9)])
    assert whole["residuals"] == {"a": "a", "b": "b", "c": "c"}
    assert whole["rates"] == {"a": 0.1, "b": 0.1, "c": 0.3} and whole["committed"] == 5
    one, other = shared_out(whole, [["a", "b"], ["c"]])
    assert one["owned"] == first["owned"] and one["residuals"] == first["residuals"]
    assert (one["committed"], one["asked"], one["steps"]) == (5, 0.5, 6)
    assert "guard" not in one
    assert other["residuals"] == second["residuals"] and "owned" not in other
    assert (other["committed"], other["guard"], other["steps"]) == (2, [1.0], 9)
    assert "asked" not in other


def test_other_optimizers_get_the_counters_of_the_first() -> None:
    whole = of_several([(state("a", committed=5), 6), (state("b", committed=2), 9)])
    (alone,) = shared_out(whole, [["a", "b"]])
    assert alone == {key: each for key, each in whole.items() if key != "optimizers"}
    parts = shared_out(alone, [["b"], ["a"]])
    assert [part["residuals"] for part in parts] == [{"b": "b"}, {"a": "a"}]
    assert [part["committed"] for part in parts] == [5, 5]


def test_what_is_of_no_optimizer_is_left_to_the_first_to_refuse() -> None:
    first, second = shared_out(state("a", "b", "strange", committed=1), [["a"], ["b"]])
    assert [*first["residuals"]] == ["a", "strange"] and [*second["residuals"]] == ["b"]


def test_the_state_of_one_is_as_it_was() -> None:
    own = state("a", committed=5, owned=True)
    assert of_several([(own, 7)]) == own
    assert shared_out(own, [["a"]]) == [own]
    assert of_several([]) == {}


def test_owners_of_different_kinds_have_no_state_in_common() -> None:
    def of(kind: str, owner: dict[str, Any], parts: int) -> Any:
        return SimpleNamespace(kind=kind, owner=owner, parts=parts)

    sharded = of("sharded", {"ranks": 4, "rank": 1}, 4)
    check_owners([sharded, of("allgather", {}, 0), sharded])
    with pytest.raises(ConfigError, match=r"selects sharded and hierarchical.*Name the exchange"):
        check_owners([sharded, of("hierarchical", {"ranks": 4, "rank": 1, "nodes": 2}, 2)])


def test_statistics_add_up() -> None:
    first = Stats(
        active=True,
        ranks=2,
        exchange="allgather",
        buckets=1,
        steps=8,
        elements=300,
        sent_bytes=10,
        dense_bytes=1200,
        residual_norm=3.0,
        step_factor=0.5,
        element_bytes={"residuals": 8.0, "squares": 4.0},
        fallbacks={"trend": 1},
        warnings=("one",),
    )
    second = replace(first, steps=2, elements=100, residual_norm=4.0, step_factor=1.0, node_bytes=7)
    second = replace(second, element_bytes={"residuals": 8.0}, exchange="sharded")
    both = in_all([first, second])
    assert (both.steps, both.elements, both.sent_bytes, both.ranks) == (10, 400, 20, 2)
    assert (both.residual_norm, both.step_factor, both.node_bytes) == (5.0, 0.5, None)
    assert both.element_bytes == {"residuals": 8.0, "squares": 3.0}
    assert both.fallbacks == {"trend": 2} and both.warnings == ("one",)
    assert both.exchange == "allgather; sharded" and both.reduction == 120.0
    assert in_all([first]) is first


def test_a_line_says_whose_step_it_was(tmp_path: Path) -> None:
    write = JsonLines(tmp_path / "rank0.jsonl")
    counters = StepCounters(3, True, 1, 1, 1, 1, None, None, ())
    write(counters)
    write(replace(counters, optimizer=1))
    write.close()
    lines = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert [line.get("optimizer") for line in lines] == [None, 1]
