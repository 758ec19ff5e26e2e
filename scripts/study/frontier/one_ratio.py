"""The exchanges at the same ratio: what `exchange="auto"` saves, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from study.frontier import agenda
from study.frontier.agenda import Point
from study.frontier.measured import Group, Measured
from study.markdown import table

TEXT = """\
## At the same ratio

`exchange="auto"` takes the exchange from whose busiest node the fewest bytes leave, at the ratio
that is asked for. Where owners select a second time, of sums of what ranks have selected, they
leave out more than an allgather does at that ratio: less traffic is not free. {values}, ratio
{ratio:g}; less dense, and times fewer bytes at {ranks} ranks.

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
        *(f"{group.series.workload}, {group.series.optimizer}" for group in columns),
    ]
    first = points[0]
    return TEXT.format(
        values=first.values, ratio=first.ratio, ranks=agenda.RANKS, table=table(header, rows)
    )


def _cell(group: Group, point: Point, shown: Callable[[Group, Measured], str]) -> str:
    found = group.find(point)
    return "not run" if found is None else f"{shown(group, found)}, {found.reduction:.0f}x"
