"""Write docs/trouble.md from the stored results alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from study.markdown import table
from trouble.runs import COMPUTE, HOSTS, PLAIN, RATE, RUNS, WAYS

ORDER = """\
- TopKEF adds payloads in rank order, whenever they arrive, so its result does not depend on timing.
  Horovod's dense allreduce adds in an order that depends on which gradients were ready together.
  Its last bits can differ from run to run, also without any trouble.
- Trouble makes ranks wait with any exchange. The shorter a step was before, the larger is the share
  of waiting, and the smaller is the speed-up by compression. Medians:"""

Job = dict[str, Any]
Results = dict[str, Job]

PAGE = """\
# Slow ranks and lost packets

<!-- Written by `make bench-trouble` from docs/results/trouble.json; see scripts/trouble. -->

This page measures what one slow rank, and a network that loses packets, do to step time, weights,
residuals and accuracy. It compares Horovod's dense allreduce with TopKEF at ratio 0.01, with
plain error feedback and float32 or int8 values.

- **Model and data**: `examples/pytorch_digits.py`, 283,786 parameters.
- **Ranks**: {hosts} hosts with one rank each, on Gloo. No GPU.
- **Network**: emulated, {rate} a host. The hosts are network namespaces of one machine
  (`scripts/netlab`) and share its CPU cores.
- **Steps**: all three methods take turns, step by step, in one job. All ranks meet at a barrier
  before each step. Each step sleeps for {compute:g} ms in place of a larger model's compute; the
  slow rank sleeps ten times as long.

## Summary

{meaning}

## What to do

- **A slow rank.** All ranks wait for it, with any exchange. Compression shortens the exchange, not
  the wait. `HOROVOD_TIMELINE` shows which rank comes last. Give each rank the same amount of work,
  keep data loading out of the step, and take a slow host out. Residuals need no attention: an
  exchange waits for every rank's payload, so no gradient is ever late. If a rank may hang, set
  `HOROVOD_STALL_SHUTDOWN_TIME_SECONDS` ([across-nodes.md](across-nodes.md)).
- **Lost packets.** TCP sends them again. That costs time and nothing else; no setting of TopKEF has
  to change. `nstat -az TcpRetransSegs TcpOutSegs`, before and after a run, shows how many packets a
  host sends again. If it is more than a few, look for a bad cable, port or queue first: mending it
  is worth more than compression.
- **If loss cannot be avoided**, shorten TCP's time-out. When the last packet of a short payload is
  lost, no later packet reveals it, and TCP waits for its time-out: 200 ms on Linux, many times
  longer than the exchange. Set a shorter one on every host, but longer than its network takes to
  answer. `ip route show` prints the line to change:

      ip route change 10.77.0.0/24 dev eth0 src 10.77.0.1 rto_min 5ms
{sooner}
- **Both.** Compare `stats().residual_norm` with `stats().gradient_norm` as usual
  ([residuals.md](residuals.md)). Slow ranks and lost packets do not change them.

## Time

- *step*: from the barrier to the end of the optimizer's step, on the slowest rank.
- *exchange*: from a rank's last gradient to its exchanged gradients, on the rank that was ready
  last.
- *waiting*: the same on the rank that waited longest, for other ranks and for the network.
- *packets sent again*: the share of TCP segments, over all hosts of the job.
- *times none*: the step, divided by the step without trouble.

{times}

Medians; in brackets, the time that nine of ten steps did not exceed. The job without trouble was
measured twice, at the start and later: the difference between the two is noise.

## Results

Weights and residuals of all ranks, compared bit for bit with the job without trouble after the same
number of steps. *Residual* and *gradient* are means of the ranks' norms.

{results}

## Machine

{machine}

Command: `sudo make bench-trouble`. The authors' bias: they want TopKEF to win.
"""


def page(results: Results) -> str:
    """The whole page."""
    return PAGE.format(
        hosts=HOSTS,
        rate=RATE.replace("mbit", " Mbit/s"),
        compute=1e3 * COMPUTE,
        machine=_machine(results),
        times=_times(results),
        results=_results(results),
        meaning="\n".join(_meaning(results)),
        sooner="".join(_sooner(results)),
    )


def _machine(results: Results) -> str:
    first = next(iter(results.values()))["machine"]
    machine = (
        f"{first['cpu']}, {first['cores']} cores for all hosts and for other work, "
        f"Linux {first['kernel']}, Python {first['python']}, PyTorch {first['torch']}, Horovod "
        f"{first['horovod']}. A job with fewer than {_planned(results)} steps reached its "
        "time limit."
    )
    rows = (
        [
            RUNS[key].title,
            job["machine"]["date"],
            f"{job['load']['before']:g}, {job['load']['after']:g}",
            str(_steps(job)),
        ]
        for key, job in results.items()
    )
    header = ["trouble", "ended", "load average before, after", "steps"]
    return f"{machine}\n\n{table(header, rows)}"


def _planned(results: Results) -> int:
    return max(int(job["planned_steps"]) for job in results.values())


def _steps(job: Job) -> int:
    return len(next(iter(job["ways"].values()))["step"])


def resent(job: Job) -> float:
    """Share of the TCP segments that were sent again."""
    sent = sum(host["sent"] for host in job["segments"])
    return float(sum(host["resent"] for host in job["segments"]) / sent)


def _times(results: Results) -> str:
    header = ["trouble", "packets sent again", "", "bytes a step and rank", "step, ms"]
    header += ["times none", "exchange, ms", "waiting, ms"]
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
            f"{found['sent_bytes']:,}",
            _typical(found["step"]),
            f"{_median(found['step']) / _median(plain['step']):.2f}",
            _typical(found["exchange"]),
            _typical(found["waiting"]),
        ]


def _typical(seconds: list[float]) -> str:
    ninth = statistics.quantiles(seconds, n=10)[-1]
    return f"{1e3 * _median(seconds):.0f} ({1e3 * ninth:.0f})"


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def _results(results: Results) -> str:
    header = ["trouble", "", "after", "weights", "residuals", "accuracy", "without trouble"]
    header += ["residual", "gradient"]
    return table(header, (line for key in results for line in _result_lines(results, key)))


def _result_lines(results: Results, key: str) -> Iterator[list[str]]:
    for way in WAYS:
        step, here, plain = compared(results, key, way)
        has_residuals = "residuals" in here[0]
        yield [
            RUNS[key].title if way == WAYS[0] else "",
            way,
            f"{step} steps",
            _same(here, plain, "weights"),
            _same(here, plain, "residuals") if has_residuals else "",
            f"{100 * here[0]['accuracy']:.2f}%",
            f"{100 * plain[0]['accuracy']:.2f}%",
            f"{_mean(here, 'residual_norm'):.3g}" if has_residuals else "",
            f"{_mean(here, 'gradient_norm'):.3g}" if has_residuals else "",
        ]


def compared(results: Results, key: str, way: str) -> tuple[str, list[Job], list[Job]]:
    """The last step that both jobs recorded, and its records: with trouble, and without."""
    marks, plain = (results[each]["ways"][way]["marks"] for each in (key, PLAIN))
    step = max(marks.keys() & plain.keys(), key=int)
    return step, marks[step], plain[step]


def is_same(here: list[Job], plain: list[Job], what: str) -> bool:
    """Whether every rank has the same bits."""
    return [rank[what] for rank in here] == [rank[what] for rank in plain]


def _same(here: list[Job], plain: list[Job], what: str) -> str:
    return "equal" if is_same(here, plain, what) else "differ"


def _mean(ranks: list[Job], what: str) -> float:
    return statistics.mean(rank[what] for rank in ranks)


def _meaning(results: Results) -> Iterator[str]:
    troubled = [key for key in results if key != PLAIN]
    for way in WAYS:
        same = [is_same(*compared(results, key, way)[1:], "weights") for key in troubled]
        yield (
            f"- {way}: in {sum(same)} of {len(same)} jobs, the same weights as in the job without "
            "trouble."
        )
    yield f"{ORDER}\n"
    ours = WAYS[-1]
    header = ["trouble", "dense exchange, ms", f"{ours} exchange, ms", f"{ours}: step faster by"]
    yield table(header, (_speed_up(results[key]["ways"], RUNS[key].title) for key in results))


def _speed_up(methods: dict[str, Job], title: str) -> list[str]:
    dense, ours = methods[WAYS[0]], methods[WAYS[-1]]
    exchanges = (f"{1e3 * _median(each['exchange']):.0f}" for each in (dense, ours))
    return [title, *exchanges, f"{_median(dense['step']) / _median(ours['step']):.2f}x"]


def _sooner(results: Results) -> Iterator[str]:
    """The effect of a shorter time-out, where it was measured."""
    for key in results:
        sooner = f"{key}-soon"
        if sooner in results:
            before, after = (_median(results[k]["ways"][WAYS[-1]]["step"]) for k in (key, sooner))
            yield (
                f"\n  With {RUNS[key].title}, this shortened a step with {WAYS[-1]} from "
                f"{1e3 * before:.0f} to {1e3 * after:.0f} ms."
            )
