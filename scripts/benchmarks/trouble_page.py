"""Figures of docs/trouble.md, from the stored results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.trouble import COMPUTE, HOSTS, PLAIN, RATE, RUNS, WAYS
from pages import Values
from pages.markdown import table

Job = dict[str, Any]
Results = dict[str, Job]


def values(results: Results) -> Values:
    """The page's figures by name."""
    return {
        "hosts": HOSTS,
        "rate": RATE.replace("mbit", " Mbit/s"),
        "compute": f"{1e3 * COMPUTE:g}",
        "times": _times(results),
        "same": "\n".join(_same_weights(results)),
        "sooner": "\n".join(_sooner(results)),
    }


def resent(job: Job) -> float:
    """Share of the TCP segments that were sent again."""
    sent = sum(host["sent"] for host in job["segments"])
    return float(sum(host["resent"] for host in job["segments"]) / sent)


def _times(results: Results) -> str:
    header = ["trouble", "packets sent again", "", "step, ms", "times none", "exchange, ms"]
    header += ["dense's step / this"]
    return table(header, (line for key in results for line in _time_lines(results, key)))


def _time_lines(results: Results, key: str) -> Iterator[list[str]]:
    job = results[key]
    for way in WAYS:
        found, plain = job["ways"][way], results[PLAIN]["ways"][way]
        is_first = way == WAYS[0]
        yield [
            RUNS[key].title if is_first else "",
            f"{100 * resent(job):.2g}%" if is_first else "",
            way,
            _typical(found["step"]),
            f"{_median(found['step']) / _median(plain['step']):.2f}",
            _typical(found["exchange"]),
            f"{_median(job['ways'][WAYS[0]]['step']) / _median(found['step']):.1f}",
        ]


def _typical(seconds: list[float]) -> str:
    ninth = statistics.quantiles(seconds, n=10)[-1]
    return f"{1e3 * _median(seconds):.0f} ({1e3 * ninth:.0f})"


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def compared(results: Results, key: str, way: str) -> tuple[str, list[Job], list[Job]]:
    """The last step that both jobs recorded, and its records: with trouble, and without."""
    marks, plain = (results[each]["ways"][way]["marks"] for each in (key, PLAIN))
    step = max(marks.keys() & plain.keys(), key=int)
    return step, marks[step], plain[step]


def is_same(here: list[Job], plain: list[Job], what: str) -> bool:
    """Whether every rank has the same bits."""
    return [rank[what] for rank in here] == [rank[what] for rank in plain]


def _same_weights(results: Results) -> Iterator[str]:
    troubled = [key for key in results if key != PLAIN]
    for way in WAYS:
        same = [is_same(*compared(results, key, way)[1:], "weights") for key in troubled]
        yield (
            f"- {way}: in {sum(same)} of {len(same)} jobs, the same weights as in the job without "
            "trouble."
        )


def _sooner(results: Results) -> Iterator[str]:
    """The effect of a shorter time-out, where it was measured."""
    for key in results:
        sooner = f"{key}-soon"
        if sooner in results:
            before, after = (_median(results[k]["ways"][WAYS[-1]]["step"]) for k in (key, sooner))
            yield (
                f"  With {RUNS[key].title}, this shortened a step with {WAYS[-1]} from "
                f"{1e3 * before:.0f} to {1e3 * after:.0f} ms."
            )
