"""A picture of time against bandwidth: one run for each bandwidth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_topk.cli.bench.figures import Result, figures
from horovod_topk.cli.bench.methods import KINDS, NONE, TOPK
from horovod_topk.cli.canvas import canvas
from horovod_topk.cost import quantities

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draw exchange time per step for all methods; runs of unknown bandwidth come last."""
    check_comparable(results)
    with canvas(path, width=8.5) as axes:
        _fill(axes, sorted(results, key=lambda run: run["rate"] or float("inf")))


def _fill(axes: Axes, runs: Sequence[Result]) -> None:
    for name in dict.fromkeys(name for run in runs for name in figures(run) if name != NONE):
        places, heights, low, high = _line(name, runs)
        if not places:
            continue
        style: dict[str, Any] = {"linestyle": "--" if name in {*KINDS} - {TOPK} else "-"}
        errors = [low, high]
        axes.errorbar(places, heights, yerr=errors, marker="o", capsize=2, label=name, **style)
    labels = [quantities.rate(run["rate"]) if run["rate"] else "not said" for run in runs]
    axes.set_xticks(range(len(runs)), labels)
    if axes.has_data():  # else no exchange took longer than a step without one
        axes.set_yscale("log")
    axes.set_xlabel("link of each host")
    axes.set_ylabel("exchange, seconds a step (bars: least and most)")
    first = runs[0]
    where = f"{first['hosts']} hosts" if first["hosts"] > 1 else "one host: loopback, no network"
    axes.set_title(f"{first['model']}, {first['ranks']} ranks on {where}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.has_data():
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def check_comparable(results: Iterable[Mapping[str, Any]]) -> None:
    """Check that one picture can show all these runs."""
    kinds = {(run["model"], run["ranks"], run["compute"]) for run in results}
    if len(kinds) > 1:
        raise ValueError(
            f"one picture of runs that differ in more than bandwidth: {sorted(map(str, kinds))}. "
            "Draw those of one model, number of ranks and --compute"
        )


def _line(
    name: str, runs: Sequence[Result]
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Positions, medians, and their distances to least and most, for runs with a positive time."""
    found = [(place, figures(run).get(name)) for place, run in enumerate(runs)]
    seen = [(place, each) for place, each in found if each is not None and each.exchange > 0]
    return (
        [place for place, _ in seen],
        [each.exchange for _, each in seen],
        [each.exchange - max(each.least, each.exchange / 100) for _, each in seen],
        [each.most - each.exchange for _, each in seen],
    )
