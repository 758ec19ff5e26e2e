"""Loss against hours and gigabytes: losses of simulated runs, seconds of steps on emulated hosts.

A run of `does_it_pay.toml` has a loss after so many steps, and `benchmarks/does_it_pay.py` the
seconds of such a step on hosts with links of some rate. Their product is joined here; the job
`whole`, which trains on such hosts, says how right that is. Predictions are those of `cost`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import does_it_pay as benchmark
from benchmarks.does_it_pay import (
    ALONE,
    BFLOAT16,
    EARLY,
    FLOAT16,
    FLOAT32,
    LOCAL,
    POWERSGD,
    SHARDED,
    TOPK,
)
from horovod_topk.cli.canvas import panels
from horovod_topk.cli.compare.records import Record
from horovod_topk.cli.compare.result import Found
from horovod_topk.cli.compare.uncertainty import BETTER, WORSE
from horovod_topk.cli.compare.verdict import judge
from horovod_topk.cli.models import specs_of
from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.cost import machine as machines
from horovod_topk.cost import quantities
from horovod_topk.cost.crossover import faster, written
from horovod_topk.cost.machine import Kernels, Machine
from horovod_topk.cost.step import Training, step
from horovod_topk.cost.strategies import Strategy, all_strategies
from horovod_topk.cost.traffic import nodes_of
from horovod_topk.methods.topk import TopK
from horovod_topk.updates.tracker import Rule
from pages import RESULTS, Values, stored
from pages.markdown import table
from study.large import GPT
from study.results import DENSE, Study, end

if TYPE_CHECKING:
    from matplotlib.axes import Axes

USE = "used", "gradient", "residual"
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s, 2 hosts"}
RANKS, METRIC, AXIS = 4, "bits_per_byte", "bits a byte, held out"
STYLES: dict[str, dict[str, Any]] = {
    DENSE: {"color": "#888888", "linestyle": "--"},
    BFLOAT16: {"color": "#444444", "linestyle": "--"},
    POWERSGD: {"color": "#c2672f", "linestyle": "-."},
    TOPK: {"color": "#1f6fb2", "linewidth": 2.5},
    SHARDED: {"color": "#1f6fb2", "linestyle": ":"},
    LOCAL: {"color": "#2f8f4e"},
}
LABELS = {DENSE: "dense, float32", BFLOAT16: "dense, 16 bits", LOCAL: "local steps, every 30"}
Points = Sequence[tuple[float, float]]  # steps, and the loss after them

# GPT-2 with 124 million parameters: 19,560 steps of 524,288 tokens took 8 A100 90 minutes and
# 8 H100 45 (the baseline of github.com/KellerJordan/modded-nanogpt, README at 0006a9c).
STEPS_OF_GPUS = 19_560
MINUTES_OF_GPUS = {"A100": 90, "H100": 45}
GPU_RATES = ("1gbit", "10gbit", "25gbit", "100gbit")
GPUS = 8
# What an H200 added to an AdamW step of a ResNet-50 with 25.6 million parameters (docs/gpu.md): of
# the GPU's work alone, and with Python's.
ADDED_SECONDS, ADDED_ALL, ADDED_ELEMENTS = 1.2e-3, 10.2e-3, 25.6e6


@dataclass(frozen=True)
class Joined:
    """One case of the study with the seconds of its steps."""

    study: Study
    pattern: str  # of the titles of its cases, which differ in the learning rate
    jobs: Mapping[str, Any]
    model: str = ""  # with which the names of its jobs begin

    @property
    def found(self) -> Iterable[Found]:
        """Its cases."""
        return chain(*map(self.study.cases.__getitem__, self.study.titles(self.pattern)))

    @cached_property
    def best(self) -> dict[str, tuple[float, Record]]:
        """The learning rate and the run with the least loss at the end, of each method."""
        found: dict[str, tuple[float, Record]] = {}
        for case in self.found:
            for name, runs in case.runs.items():
                for run in runs.values():
                    if name not in found or _last(run) < _last(found[name][1]):
                        found[name] = case.settings.options["lr"], run
        return {name: found[name] for name in sorted(found, key=[DENSE, *STYLES, *found].index)}

    @cached_property
    def curves(self) -> dict[str, Points]:
        """The losses of every method that has been run. Without a run 16 bits have dense's."""
        curves: dict[str, Points] = {
            name: [(p.step, p.metrics[METRIC] or math.inf) for p in run.points]
            for name, (_, run) in self.best.items()
        }
        return {DENSE: curves[DENSE], BFLOAT16: curves[DENSE], **curves}

    def sent(self, name: str) -> float:
        """Return the bytes that a rank sends in a step, on average over the run."""
        run = self.best[DENSE if name == BFLOAT16 else name][1]
        return (run.sent_bytes or math.nan) / (2 if name == BFLOAT16 else 1)

    def seconds(self, rate: str, name: str) -> float:
        """Return the seconds of a step; for 16 bits those of the faster of two methods."""
        methods = (BFLOAT16, FLOAT16) if name == BFLOAT16 else (name,)
        found = [self._measured(rate, each) for each in methods]
        known = [statistics.median(each["seconds"]) for each in found if each is not None]
        return min(known, default=math.nan)

    def time(self, rate: str, name: str, steps: float) -> float:
        """Return the seconds of a run's first steps; the default's first EARLY take longer."""
        early = self._measured(f"{rate}-early", name)
        if early is None:
            return steps * self.seconds(rate, name)
        first = min(steps, EARLY)
        slower = first * statistics.median(early["seconds"])
        return slower + (steps - first) * self.seconds(rate, name)

    def gigabytes(self, name: str, steps: float) -> float:
        """Return what a rank sends in a run's first steps; the default's first EARLY send more."""
        early, steady = (self._measured(job, name) for job in ("1gbit-early", "1gbit"))
        if early is None or steady is None:
            return steps * self.sent(name) / 1e9
        first = min(steps, EARLY)
        later = (steps - first) * statistics.median(steady["bytes"])
        return (first * statistics.median(early["bytes"]) + later) / 1e9

    def draw_hours(self, axes: Axes, rate: str) -> None:
        """Draw losses against hours."""
        self.draw(axes, lambda name, steps: self.time(rate, name, steps) / 3600)
        axes.set_xlabel(f"hours, {RATES[rate]}")

    def draw(self, axes: Axes, cost: Callable[[str, float], float]) -> None:
        """Draw losses against what a method's steps cost, and a line at dense's last loss."""
        for name in filter(self.curves.get, STYLES):
            steps, losses = zip(*self.curves[name], strict=True)
            costs = [cost(name, each) for each in steps]
            axes.plot(costs, losses, label=LABELS.get(name, name), **STYLES[name])
        axes.set_xscale("log")
        axes.axhline(self.target, color="#bbbbbb", linewidth=0.8)
        axes.grid(alpha=0.3)

    @property
    def target(self) -> float:
        """Dense's loss at the end of its run."""
        return self.curves[DENSE][-1][1]

    def _measured(self, job: str, name: str) -> benchmark.Result | None:
        """Return what a job has measured of a variant, if it has."""
        variants: Mapping[str, Any] = self.jobs.get(self.model + job, {}).get("variants", {})
        return variants.get(name)


def _last(run: Record) -> float:
    loss = end(METRIC, run)
    return math.inf if loss is None else loss


def shown_loss(loss: float) -> str:
    """Format a loss; infinity is that of a run that diverged."""
    return f"{loss:.3f}" if math.isfinite(loss) else "diverged"


def reached(points: Points, target: float) -> float:
    """Return the steps after which a loss is first as low as the target; infinity: never.

    Between two measured points the loss is taken to fall evenly.
    """
    if points[0][1] <= target:
        return points[0][0]
    for (before, above), (after, below) in pairwise(points):
        if below <= target:
            return before + (after - before) * (above - target) / (above - below)
    return math.inf


def duration(seconds: float) -> str:
    """Format seconds as minutes, or as hours if there are many."""
    if math.isnan(seconds):
        return "not measured"
    if math.isinf(seconds):
        return "not reached"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def times(slow: float, fast: float) -> str:
    """Format the ratio of two durations, or a dash if it is not known."""
    if math.isnan(slow / fast) or math.isinf(fast):
        return "-"
    return "always" if math.isinf(slow) else f"{slow / fast:.1f}"


def target_table(joined: Joined, share: float = 1.0) -> str:
    """Tabulate each method's time to the loss that dense has after a share of its steps."""
    curves = joined.curves
    last = curves[DENSE][-1][0]
    target = next(loss for steps, loss in curves[DENSE] if steps >= share * last - 1)
    needed = {name: reached(points, target) for name, points in curves.items()}
    rows = []
    for name, points in curves.items():
        steps, learning_rate = needed[name], joined.best.get(name, joined.best[DENSE])[0]
        row = [LABELS.get(name, name), f"{learning_rate:g}", shown_loss(points[-1][1]), "-", "-"]
        if math.isfinite(steps):
            row[3:] = f"{steps:.0f}", f"{joined.gigabytes(name, steps):.2f}"
        for rate in ("100mbit", "1gbit"):
            taken = joined.time(rate, name, steps)
            beside = times(joined.time(rate, BFLOAT16, needed[BFLOAT16]), taken)
            row.append(f"{duration(taken)} ({beside})")
        rows.append(row)
    head = ["", "rate", "loss at the end", "steps", "GB a rank", "100 Mbit/s", "1 Gbit/s"]
    return table(head, rows)


def distant_table(joined: Joined) -> str:
    """Tabulate how long methods take to the last loss of local steps, over links with delay."""
    target, rows = joined.curves[LOCAL][-1][1], []
    measured = joined.jobs["distant"]["variants"]
    needed = {
        name: reached(points, target)
        for name, points in joined.curves.items()
        if name in (BFLOAT16, *measured)
    }
    slow = joined.time("distant", BFLOAT16, needed[BFLOAT16])
    for name, steps in needed.items():
        taken = joined.time("distant", name, steps)
        shown = f"{steps:.0f}" if math.isfinite(steps) else "-"
        rows.append([LABELS.get(name, name), shown, duration(taken), times(slow, taken)])
    head = ["", f"steps to {target:.3f}", "100 Mbit/s, 50 ms", "sooner than 16 bits"]
    return table(head, rows)


def sooner(joined: Joined, rate: str) -> str:
    """Format the speedup: seconds of dense in 16 bits to its last loss, over TopKEF's to it."""
    dense, ours = (
        joined.time(rate, name, reached(joined.curves[name], joined.target))
        for name in (BFLOAT16, TOPK)
    )
    return f"{dense / ours:.{0 if rate == '100mbit' else 1}f}"


def step_table(joined: Joined) -> str:
    """Tabulate the seconds of a step, for each variant and rate."""
    names = {rate: joined.model + rate for rate in RATES}
    jobs = {r: joined.jobs[n]["variants"] for r, n in names.items() if n in joined.jobs}
    rows = []
    for name in dict.fromkeys(chain(*jobs.values())):
        found = (variants.get(name) for variants in jobs.values())
        rows.append(
            [name, *("-" if it is None else benchmark.ranged(it["seconds"]) for it in found)]
        )
    return table(["seconds a step", *(RATES[rate] for rate in jobs)], rows)


def picture(joined: Joined) -> str:
    """Draw loss against hours at two rates and against gigabytes; return a link to the picture."""
    path = RESULTS / "does-it-pay.png"
    with panels(path, 1, 3, (12, 4)) as ((*hours, gigabytes),):
        for axes, rate in zip(hours, ("100mbit", "1gbit"), strict=True):
            joined.draw_hours(axes, rate)
        joined.draw(gigabytes, joined.gigabytes)
        gigabytes.set_xlabel("GB a rank sends")
        hours[0].set_ylabel(AXIS)
        hours[0].legend(frameon=False, fontsize=8, loc="upper right")
    return f"![Loss against hours and gigabytes](results/{path.name})"


def other_rates(joined: Joined) -> str:
    """Tabulate the last losses of every method, for each learning rate."""
    rows: dict[float, dict[str, str]] = {}
    for case in joined.found:
        runs = {name: next(iter(found.values())) for name, found in case.runs.items() if found}
        ends = {name: shown_loss(_last(run)) for name, run in runs.items()}
        rows[case.settings.options["lr"]] = ends
    names = dict.fromkeys(chain(*(rows[rate] for rate in sorted(rows))))
    lines = [[f"{lr:g}", *(rows[lr].get(n, "-") for n in names)] for lr in sorted(rows)[::-1]]
    return table(["learning rate", *(LABELS.get(name, name) for name in names)], lines)


def join_error(joined: Joined) -> dict[str, Any]:
    """Compare the run on emulated hosts with the joined curve: all losses, and its time."""
    points = joined.jobs["whole"]["points"]
    simulated = dict(replace(joined, pattern="byte GPT*").curves[TOPK])  # at its learning rate
    losses = [abs(p["bits_per_byte"] / simulated[p["step"]] - 1) for p in points]
    steps, seconds = points[-1]["step"], points[-1]["seconds"]
    return {
        "whole_steps": steps,
        "whole_loss_error": 100 * max(losses),
        "whole_seconds_error": 100 * (seconds / joined.time("100mbit", TOPK, steps) - 1),
        "whole_minutes": seconds / 60,
    }


# Predictions


def strategies_of(specs: Sequence[TensorSpec], nodes: Nodes) -> dict[str, Strategy]:
    """Return the plan's strategies: dense in both formats, PowerSGD, TopKEF over both exchanges."""
    found = all_strategies(specs, nodes, TopK(), rank=4, values=("int4",), update_rule=Rule("adam"))
    keys = {
        "allreduce float32": FLOAT32,
        "allreduce float16": FLOAT16,
        "PowerSGD rank 4": POWERSGD,
        "allgather int4": TOPK,
        "sharded int4": SHARDED,
    }
    named = {f"{each.exchange} {each.values}": each for each in found}
    return {name: named[key] for key, name in keys.items()}


def predicted(specs: Sequence[TensorSpec], joined: Joined) -> str:
    """Tabulate the plan's seconds of a step beside the measured ones, on the emulated hosts."""
    rows, found = [], strategies_of(specs, nodes_of(RANKS, 1))
    for rate in ("100mbit", "1gbit"):
        there = replace(machines.read(machines.REFERENCE), cores=2, crowd=RANKS)
        training = Training(joined.seconds(rate, ALONE))
        for name, strategy in found.items():
            said = at(strategy, there, rate, training)
            measured = joined.seconds(rate, name)
            off = f"{100 * (said / measured - 1):+.0f}%"
            rows.append([RATES[rate], name, f"{said:.2f}", f"{measured:.2f}", off])
    return table(["", "", "predicted, s", "measured, s", "error"], rows)


def gpu(added: float) -> Machine:
    """Return a machine that adds so many seconds to a ResNet-50's step, by the element."""
    reference = machines.read(machines.REFERENCE)
    kernels = Kernels(added / ADDED_ELEMENTS, 0.0, 0.0, 0.0, 0.0)
    return replace(reference, kernels=kernels, device="cuda")


@cache
def on_nodes() -> tuple[Strategy, Strategy]:
    """Return the strategies of GPT-2 on nodes of a GPU each: dense in 16 bits, and TopKEF."""
    found = strategies_of(specs_of("gpt2"), nodes_of(GPUS, 1))
    return found[FLOAT16], found[TOPK]


def trained_on(name: str) -> Training:
    """Return the time of a step's compute on these GPUs."""
    return Training(60 * MINUTES_OF_GPUS[name] / STEPS_OF_GPUS)


def on_gpus() -> str:
    """Tabulate the predicted seconds of GPT-2's step on GPUs, and the rates at which dense wins."""
    (dense, ours), costs = on_nodes(), (ADDED_SECONDS, ADDED_ALL)
    rows = []
    for name in MINUTES_OF_GPUS:
        for rate in GPU_RATES:
            steps = [(dense, 0.0), *((ours, added) for added in costs)]
            found = (at(each, gpu(added), rate, trained_on(name)) for each, added in steps)
            rows.append([name, rate_of(rate), *(f"{1e3 * seconds:.0f}" for seconds in found)])
        rows.append([name, "TopKEF is faster", "", *(limit(name, added) for added in costs)])
    head = ["", "", "dense, 16 bits, ms", "TopKEF, the GPU's work alone", "with Python's work"]
    return table(head, rows)


def limit(name: str, added: float = ADDED_ALL) -> str:
    """Return the bandwidths at which TopKEF's step is predicted to be shorter than dense's."""
    dense, ours = on_nodes()
    spans = faster([dense], ours, gpu(added), trained_on(name), overlap=True)
    return written(spans) or "nowhere"


def at(strategy: Strategy, there: Machine, rate: str, training: Training) -> float:
    """Predict the seconds of a step on a network of this rate."""
    network = replace(there.network, bandwidth=quantities.bits_per_second(rate))
    return step(strategy, replace(there, network=network), training, overlap=True).seconds


def rate_of(text: str) -> str:
    """Format a rate as the page writes it."""
    return quantities.rate(quantities.bits_per_second(text))


# Experts


def use_table(results: Mapping[str, Any]) -> str:
    """Tabulate residual over gradient, of experts that a rank uses seldom and often."""
    rows = []
    groups = {"in up to half of the steps": (0, 0.5), "in up to 95%": (0.5, 0.95)}
    groups |= {"in more": (0.95, 2)}
    for label, (least, most) in groups.items():
        row = [label]
        for run in results["runs"].values():
            each = zip(*(chain(*run[key]) for key in USE), strict=True)
            found = [rest / size for used, size, rest in each if least < used <= most]
            row.append(f"{statistics.median(found):.1f} ({len(found)})" if found else "none")
        rows.append(row)
    return table(["a rank uses the expert", *results["runs"]], rows)


def experts_table(study: Study) -> str:
    """Tabulate each method's cost beside dense, for the shards and rates of every case."""
    rows = []
    for title, variants in study.cases.items():
        for found in variants:
            costs = study.rows_of(found)
            if not costs:
                continue
            where = dict(found.variant)
            row = [f"{title.partition(', ')[2]}, {where['shards']} shards, {where['lr']:g}"]
            names = study.settings[0].compressors
            rows.append([*row, *(costs[n].difference if n in costs else "not run" for n in names)])
    return table(["", *study.settings[0].compressors], rows)


@cache
def reruns() -> list[list[str]]:
    """Judge quality twice, on half of the seeds each; return rows of a table."""
    rows, study = [], Study("reruns")
    for title in study.titles("*"):
        for name, row in study.rows(title).items():
            seeds, metric = sorted(row.runs), study.found(title).metric
            half = len(seeds) // 2
            found = (
                judge(
                    {seed: row.runs[seed] for seed in part},
                    {DENSE: {seed: row.dense[seed] for seed in part}},
                    metric,
                    timed=False,
                )
                for part in (seeds[:half], seeds[half:])
            )
            rows.append([title, name, *(each.beside[DENSE].steps.word for each in found)])
    return rows


def agreed() -> str:
    """Return how often both halves of the seeds led to the same word."""
    return f"{sum(first == other for *_, first, other in reruns())} of {len(reruns())}"


def contradicted() -> str:
    """Return how often one half of the seeds said better, and the other worse."""
    return str(sum({first, other} == {BETTER, WORSE} for *_, first, other in reruns()))


def read(name: str) -> tuple[Study, Mapping[str, Any]]:
    """Read the study's runs and the benchmark's seconds."""
    return Study("does_it_pay"), stored(name)


def joined_of(results: tuple[Study, Mapping[str, Any]]) -> Joined:
    """Return the runs of the byte GPT with the seconds of their steps."""
    return Joined(results[0], "*byte GPT*", results[1])


def convolutional(results: tuple[Study, Mapping[str, Any]]) -> Joined:
    """The same of the convolutional network."""
    return Joined(results[0], "*convolutions*", results[1], "convolutions-")


def values(results: tuple[Study, Mapping[str, Any]]) -> Values:
    """Return the page's figures by name."""
    jobs, joined, others = results[1], joined_of(results), convolutional(results)
    with torch.device("meta"):  # shapes alone
        model = GPT.model()
    specs = [
        TensorSpec(name, tuple(p.shape), "float32", "cpu") for name, p in model.named_parameters()
    ]
    found: dict[str, Any] = {
        "picture": partial(picture, joined),
        "seconds": lambda job: benchmark.seconds_table(jobs[job]["variants"], LOCAL),
        "steps": partial(step_table, joined),
        "sooner": partial(sooner, joined),
        "needed": lambda name: f"{reached(joined.curves[name], joined.target):.0f}",
        "step": lambda rate, name: f"{joined.seconds(rate, name):.2f}",
        "distant": partial(distant_table, joined),
        "target": lambda share: target_table(joined, float(share)),
        "predicted": partial(predicted, specs, joined),
        "early": EARLY,
        "gpus": on_gpus,
        "limit": limit,
        "rates": partial(other_rates, joined),
        "convolutions_sooner": partial(sooner, others),
        "convolutions_steps": partial(step_table, others),
        "convolutions_target": partial(target_table, others),
        "convolutions_rates": partial(other_rates, others),
        "reruns": lambda: table(["", "", "seeds 0 to 4", "seeds 5 to 9"], reruns()),
        "agreed": agreed,
        "contradicted": contradicted,
        "use": lambda: use_table(stored("experts")),
        "experts": lambda: experts_table(Study("experts")),
        "parameters": sum(spec.numel for spec in specs) / 1e6,
    }
    return found | (join_error(joined) if "whole" in jobs else {})
