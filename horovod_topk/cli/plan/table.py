"""The output of `horovod-topk plan`: a table or JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from horovod_topk.cli.options import KINDS
from horovod_topk.cli.plan.arguments import Asked
from horovod_topk.cost.crossover import Span, written
from horovod_topk.cost.machine import Machine
from horovod_topk.cost.quantities import count, milliseconds, rate
from horovod_topk.cost.step import Step
from horovod_topk.cost.verdict import Row, Verdict

HEAD = ("exchange", "values", "leave a node", "exchange", "kernels", "step")
OVERLAPPED = ("step", "efficiency", "faster than dense")
WIDTHS = (-13, -9, 13, 9, 8, 7, 8, 11, 20)  # negative: text, to the left


def lines(asked: Asked, machine: Machine, rows: Sequence[Row], verdict: Verdict) -> Iterator[str]:
    """Yield the lines of a heading, a table in milliseconds, and the verdict."""
    elements = sum(spec.numel for spec in asked.specs)
    ranks, nodes = count(sum(asked.nodes.sizes), "rank"), count(len(asked.nodes.ranks), "node")
    network, kernels = machine.network, machine.kernels
    yield (
        f"{asked.args.model}: {elements:,} float32 in {count(len(asked.specs), 'tensor')}, "
        f"{ranks} on {nodes}, ratio {asked.config.ratio:g}"
        + "".join(f", {pattern}={ratio:g}" for pattern, ratio in asked.config.ratios or ())
        + f", {asked.setting}, gradients on a {KINDS[asked.args.device]}"
    )
    yield (
        f"{milliseconds(asked.training.compute)} ms of compute a step; network "
        f"{rate(network.bandwidth)}, {milliseconds(network.latency)} ms a message, "
        f"{milliseconds(network.overhead)} ms a collective"
    )
    slowdown = machine.slowdown(asked.training.ranks_per_node)
    shared = f", {slowdown:.3g} times slower as ranks share cores" if slowdown > 1 else ""
    yield (
        f"kernels: encode {1e9 * kernels.encode:.3g}, clear {1e9 * kernels.clear:.3g} ns an "
        f"element, decode {1e9 * kernels.decode:.3g} ns an entry{shared}"
    )
    yield f"constants: {machine.origin}"
    yield from (f"{name}: {text}" for name, text in assumptions(asked, machine).items())
    yield ""
    yield f"{'':<35}{'nothing overlaps, ms':>24}{'overlapped, ms':>19}"
    yield _columns(*HEAD, *OVERLAPPED)
    for row in rows:
        yield _columns(
            row.strategy.exchange,
            row.strategy.values,
            f"{row.strategy.node_bytes:,}",
            milliseconds(row.alone.exchange),
            milliseconds(row.alone.kernels),
            milliseconds(row.alone.seconds),
            milliseconds(row.overlapped.seconds),
            f"{row.overlapped.efficiency:.1%}",
            _faster(row) if row is not rows[0] else "",
        )
    yield ""
    if any(row.strategy.name == asked.default for row in rows):
        yield f"TopKEF() without settings: {asked.default}"
    yield verdict.text


def assumptions(asked: Asked, machine: Machine) -> dict[str, str]:
    """The assumptions of the prediction, by subject."""
    found = {}
    if text := caveat(asked, machine):
        found["device"] = text
    if asked.update_rule is not None and max(asked.nodes.sizes) > 1:
        found["hierarchical"] = (
            "it does not adapt an optimizer's steps, and is left out; --optimizer none lists it"
        )
    if asked.others:
        found["other compressors"] = (
            f"what {', '.join(asked.others)} computes is timed on this machine's CPU, and taken in "
            "multiples of r += g"
        )
    found["overlap"] = (
        "the verdict and the last column assume that backward overlaps the exchange; --no-overlap "
        "assumes that nothing overlaps"
        if asked.overlap
        else "the verdict and the last column assume that nothing overlaps (--no-overlap)"
    )
    return found


def caveat(asked: Asked, machine: Machine) -> str:
    """Why the verdict is rough where the kernels' constants are another device's, or nothing."""
    if asked.args.device == machine.device:
        return ""
    own, other = KINDS[machine.device], KINDS[asked.args.device]
    return (
        f"{own} kernel constants are applied to a {other}'s compute time, as no constants of a "
        f"{other}'s kernels are given; times of kernels and steps, and the verdict, are rough"
    )


def _columns(*texts: str) -> str:
    cells = zip(texts, WIDTHS, strict=True)
    return "".join(
        f"{text:<{-width}}" if width < 0 else f"{text:>{width}}" for text, width in cells
    ).rstrip()


def _faster(row: Row) -> str:
    if row.faster is None:
        return "one node"
    return written(row.faster) or "never"


def as_json(
    asked: Asked, machine: Machine, rows: Sequence[Row], verdict: Verdict
) -> dict[str, Any]:
    """Return the same figures in SI units: seconds, bytes, bit/s.

    "faster" is a list of ranges of bandwidth in which an exchange is faster than dense; "below" is
    null if a range has no upper limit. "faster" is null if all ranks are on one node.
    """
    return {
        "model": asked.args.model,
        "device": asked.args.device,
        "ranks": sum(asked.nodes.sizes),
        "nodes": len(asked.nodes.ranks),
        "ratio": asked.config.ratio,
        "ratios": {str(pattern): ratio for pattern, ratio in asked.config.ratios or ()},
        "momentum corrected": asked.config.momentum > 0,
        "adapted": None if asked.update_rule is None else asked.update_rule.name,
        "setting": asked.setting,
        "default": asked.default,
        "machine": asdict(machine),
        "training": asdict(asked.training),
        "strategies": [
            {
                "exchange": row.strategy.exchange,
                "values": row.strategy.values,
                "sent_bytes": row.strategy.sent_bytes,
                "node_bytes": row.strategy.node_bytes,
                "alone": _figures(row.alone),
                "overlapped": _figures(row.overlapped),
                "faster": None if row.faster is None else list(map(_span, row.faster)),
            }
            for row in rows
        ],
        "overlap": asked.overlap,
        "assumptions": assumptions(asked, machine),
        "compress": verdict.compress,
        "verdict": verdict.text,
    }


def _span(span: Span) -> dict[str, float | None]:
    return {"above": span.above, "below": None if math.isinf(span.below) else span.below}


def _figures(step: Step) -> dict[str, float]:
    return {**asdict(step), "efficiency": step.efficiency, "hidden": step.hidden}
