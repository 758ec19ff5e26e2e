"""The exchanges at the same ratio: what `exchange="auto"` saves, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from study.frontier import agenda
from study.frontier.agenda import Point
from study.frontier.measured import Group, Measured
from study.markdown import table

TEXT = """\
## At the same ratio

At the ratio that you set, `exchange="auto"` takes the exchange that sends the fewest bytes from its
busiest node. That is not free: with `sharded` an owner adds up what ranks have sent and selects a
second time, so a step applies less of the gradient than with `allgather`. Each cell has the
difference to dense and how many times fewer bytes are sent ({values}, ratio {ratio:g}, {ranks}
simulated ranks).

{table}"""


def section(groups: Sequence[Group], shown: Callable[[Group, Measured], str]) -> str:
    """Markdown; empty before there is a run.

    Args:
        groups: what has been measured.
        shown: a point's difference to dense, in words.
    """
    stages = list(agenda.one_ratio_stages())
    points = list(dict.fromkeys(point for stage in stages for point in stage.points))
    places = {(stage.series, stage.shards) for stage in stages}
    columns = [group for group in groups if (group.series, group.shards) in places]
    rows = [
        [agenda.way(point), *(_cell(group, point, shown) for group in columns)] for point in points
    ]
    if not columns:
        return ""
    header = [
        "exchange",
        *(group.name for group in columns),
    ]
    first = points[0]
    return TEXT.format(
        values=first.values, ratio=first.ratio, ranks=agenda.RANKS, table=table(header, rows)
    )


def _cell(group: Group, point: Point, shown: Callable[[Group, Measured], str]) -> str:
    found = group.find(point)
    return "not run" if found is None else f"{shown(group, found)}; {found.reduction:.0f}x"
