"""docs/trouble.md, from the results on disk and from nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from study.markdown import table
from trouble.runs import COMPUTE, HOSTS, PLAIN, RATE, RUNS, WAYS

ORDER = """\
- TopKEF adds payloads in the order of ranks, whenever they arrive. Horovod's dense allreduce adds
  in an order that depends on which gradients were ready together, so that its last bits may differ
  from run to run, without any trouble too.
- What trouble adds to a step it adds with any exchange: the shorter the step was, the more of it is
  waiting afterwards, and the less is left of what compression won."""

Job = dict[str, Any]
Results = dict[str, Job]

PAGE = """\
# Slow ranks and lost packets

<!-- Written by `make bench-trouble` from docs/results/trouble.json; see scripts/trouble. -->

What a rank that is slow and a network that loses packets do to step time, residuals and accuracy,
with Horovod's dense allreduce and with TopKEF (its defaults, and with `values="int8"`). {hosts}
hosts of one rank each (`scripts/netlab`: namespaces of one machine) on links of {rate}; the model
and data of `examples/pytorch_digits.py`, 283,786 parameters, Gloo. All three ways are trained in
one job and take turns, a step each; before every step all ranks meet at a barrier. A step has
{compute:g} ms of sleep besides, for the compute of a larger model, on the slow rank ten times as
much.

{machine}

## Time

- *step*: of the slowest rank, from the barrier to the end of the optimizer's step.
- *exchange*: from a rank's last gradient to its exchanged ones, on the rank that was ready last.
- *waiting*: the same on the rank that waited longest, for others and for the network.
- *packets sent again*: TCP segments, of all that the hosts sent in the job.

{times}

Medians, and in brackets nine steps of ten took no longer. The last lines are the first ones
measured once more, later: what differs between these is noise.

## Results

Weights and residuals of all ranks after as many steps as the job with trouble made, compared with
the job without, in every bit. Residual and gradient: means of the ranks' norms.

{results}

## What it means

{meaning}

## What to do

- **A slow rank.** All ranks wait for it, with any exchange: fewer bytes save the exchange and not
  the wait. `HOROVOD_TIMELINE` shows who comes last; give each rank as much work, keep data loading
  out of the step, and take the slow host out. Nothing has to be done about residuals: an exchange
  waits for every rank's payload, so no gradient is ever late. Where a rank may hang and not only
  lag, set `HOROVOD_STALL_SHUTDOWN_TIME_SECONDS` ([across-nodes.md](across-nodes.md)).
- **Lost packets.** TCP sends them again, so that they cost time and nothing else; no setting of
  TopKEF needs another value. `nstat -az TcpRetransSegs TcpOutSegs` before and after a run says what
  a host sends again: what is more than rare between hosts of a cluster is a fault of a cable, a
  port or a queue, and is worth more than any compression. A payload of few packets waits for TCP's
  time-out when it loses its last one, as nothing behind it tells that it is missing: 200 ms on
  Linux, many times what the exchange takes. Where loss cannot be helped, shorten that on every
  host, by as much as its network answers faster (`ip route show` has the line to change):
  `ip route change 10.77.0.0/24 dev eth0 src 10.77.0.1 rto_min 5ms`.{sooner}
- **Either.** Compare `stats().residual_norm` with `stats().gradient_norm` as ever
  ([residuals.md](residuals.md)): slow or lossy, they are those of a healthy cluster.

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
        f"{first['cpu']}, {first['cores']} cores for all hosts, which other work used as well, "
        f"Linux {first['kernel']}, Python {first['python']}, PyTorch {first['torch']}, Horovod "
        f"{first['horovod']}. Where there are fewer than {_planned(results)} steps, the job was "
        "ended after the minutes that it was given."
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
    """Share of the segments that were sent again."""
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
    """The last step that both jobs noted, and all ranks' notes of it: with trouble, and without."""
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
        yield f"- {way}: weights as in the job without trouble in {sum(same)} of {len(same)} jobs."
    yield ORDER
    for key in results:
        ways = results[key]["ways"]
        dense, ours = (_median(ways[way]["exchange"]) for way in (WAYS[0], WAYS[-1]))
        step = _median(ways[WAYS[0]]["step"]) / _median(ways[WAYS[-1]]["step"])
        yield (
            f"  - {RUNS[key].title}: the exchange took {1e3 * dense:.0f} ms dense and "
            f"{1e3 * ours:.0f} ms with {WAYS[-1]}, whose step is {step:.2f} times faster."
        )


def _sooner(results: Results) -> Iterator[str]:
    """What it did to send again sooner, where that was measured."""
    for key in results:
        sooner = f"{key}-soon"
        if sooner in results:
            before, after = (_median(results[k]["ways"][WAYS[-1]]["step"]) for k in (key, sooner))
            yield (
                f" With\n  {RUNS[key].title} that took a step with {WAYS[-1]} from "
                f"{1e3 * before:.0f} ms to {1e3 * after:.0f}."
            )
