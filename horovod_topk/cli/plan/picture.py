"""A picture of step time against bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_topk.cli.canvas import canvas
from horovod_topk.cli.plan.arguments import Asked
from horovod_topk.cost.machine import Machine
from horovod_topk.cost.quantities import milliseconds
from horovod_topk.cost.step import step
from horovod_topk.cost.strategies import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BANDWIDTHS = [10 ** (7 + i / 20) for i in range(81)]  # bit/s, 10 Mbit/s to 100 Gbit/s
COLOURS = ("#444444", "#999999", "#c98f00", "#d1495b", "#1f77b4", "#2e933c")
SHOWN = ("float32", "int8", "int4")  # drawn formats of TopKEF; more would be unreadable


def draw(path: Path, asked: Asked, machine: Machine, strategies: Sequence[Strategy]) -> None:
    """Draw step time against bandwidth; the file's suffix selects the format."""
    try:
        with canvas(path, width=8) as axes:
            _fill(axes, asked, machine, strategies)
    except (OSError, ValueError) as error:
        raise ValueError(f"--picture {path}: {error}") from error


def _fill(axes: Axes, asked: Asked, machine: Machine, strategies: Sequence[Strategy]) -> None:
    shown = [strategy for strategy in strategies if not strategy.ours or strategy.values in SHOWN]
    for position, strategy in enumerate(shown):
        style = ("-", "--", ":")[position // len(COLOURS) % 3]
        took = [1e3 * _seconds(strategy, machine, asked, bandwidth) for bandwidth in BANDWIDTHS]
        colour = COLOURS[position % len(COLOURS)]
        axes.plot([b / 1e6 for b in BANDWIDTHS], took, style, color=colour, label=strategy.name)
    axes.axvline(machine.network.bandwidth / 1e6, color="#cccccc", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s of a node's card", ylabel="ms a step")
    compute = milliseconds(asked.training.compute)
    axes.set_title(f"{asked.args.model}, {sum(asked.nodes.sizes)} ranks, {compute} ms of compute")
    axes.legend(frameon=False, fontsize=8)


def _seconds(strategy: Strategy, machine: Machine, asked: Asked, bandwidth: float) -> float:
    there = replace(machine, network=replace(machine.network, bandwidth=bandwidth))
    return step(strategy, there, asked.training, overlap=asked.overlap).seconds
