"""What a reader should take from the page, with the figures of the runs on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from study.frontier import agenda
from study.frontier.agenda import DEFAULT, MOMENTUM, PLAIN, RECIPE, SHARDED, Point
from study.frontier.measured import Group, Measured
from study.markdown import filled

TEXT = """\
## What to take from it

- **Do not train a language model with the default** (`TopKEF`: ratio {ratio:g}, float32 values,
  allgather). After {steps:,} steps the byte GPT needs more bits a byte than dense: {default_sgd}
  with SGD, {default_adamw} with AdamW. The digits CNN loses little: {digits_sgd} points with SGD,
  {digits_adamw} with AdamW.
- **`TopKEF.compact()` costs this byte GPT little**: {recipe_sgd} with SGD, {recipe_adamw} with
  AdamW, at {recipe_bytes:.0f} times fewer bytes. But it was chosen on this very model. On a small
  recurrent model it loses 9 to 11% in 300 steps, where plain error feedback loses 3.0% (two real
  ranks, by hand; those runs were not kept). Compare with dense on your own model.
- **At equal bytes, send more elements with coarser values**, down to 4 bits. At 50 times fewer
  bytes and without momentum correction, the byte GPT with SGD loses {int8} with int8 and {int4}
  with int4. With momentum correction int8 and int4 hardly differ there.
- **Use `values="sign"` only with momentum correction.** Without it the byte GPT diverges with SGD.
- **`sharded` costs more than `allgather` at the same ratio**, because owners select a second time:
  with int4 values, ratio {ratio:g}, momentum correction and SGD {sharded}, against {gathered}. It
  sends {sharded_bytes} times fewer bytes than dense at 2, 4 and 8 ranks, `allgather` sends
  {gathered_bytes} times fewer.
- The evidence is thin: small models (280 thousand parameters), short runs, one or two seeds of the
  byte GPT, which can differ by more than 10% (AdamW, momentum correction)."""

Shown = Callable[[Group, Measured], str]


def section(groups: Sequence[Group], shown: Shown) -> str:
    """Markdown; empty before the runs that it quotes are there.

    Args:
        groups: what has been measured.
        shown: a point's difference to dense, in words.
    """
    of = {
        (group.series.workload, group.series.optimizer): group
        for group in groups
        if group.shards == "equal"
    }
    figures: dict[str, object] = dict(_figures(of, shown)) if len(of) == len(agenda.SERIES) else {}
    if len(figures) < len(QUOTED):
        return ""
    figures |= {"sharded_bytes": _reductions(SHARDED), "gathered_bytes": _reductions(GATHERED)}
    figures["recipe_bytes"] = agenda.reduction("bytelm", RECIPE)
    return filled(TEXT.format(ratio=DEFAULT.ratio, steps=agenda.BYTELM.steps, **figures))


def _reductions(point: Point) -> str:
    two, four, eight = (agenda.reduction("bytelm", point, ranks) for ranks in (2, 4, 8))
    return f"{two:.0f}, {four:.0f} and {eight:.0f}"


def _corrected(point: Point) -> Point:
    return replace(point, momentum=MOMENTUM)


GATHERED = _corrected(replace(SHARDED, exchange="allgather"))
QUOTED: dict[str, tuple[str, str, Point]] = {
    "default_sgd": ("bytelm", "sgd", DEFAULT),
    "default_adamw": ("bytelm", "adamw", DEFAULT),
    "digits_sgd": ("digits", "sgd", DEFAULT),
    "digits_adamw": ("digits", "adamw", DEFAULT),
    "recipe_sgd": ("bytelm", "sgd", RECIPE),
    "recipe_adamw": ("bytelm", "adamw", RECIPE),
    "int8": ("bytelm", "sgd", replace(PLAIN, values="int8", ratio=0.014)),
    "int4": ("bytelm", "sgd", PLAIN),
    "sharded": ("bytelm", "sgd", _corrected(SHARDED)),
    "gathered": ("bytelm", "sgd", GATHERED),
}


def _figures(of: dict[tuple[str, str], Group], shown: Shown) -> Iterator[tuple[str, str]]:
    for key, (workload, optimizer, point) in QUOTED.items():
        group = of[workload, optimizer]
        if found := group.find(point):
            yield key, shown(group, found)
