"""Which ranks exchange gradients: one alone, a fixed number, or a number that may change.

In an elastic job (`horovodrun --min-np`) ranks come and go. What such a job cannot do is refused
here, before the first step.
"""

from __future__ import annotations

import os
from typing import Any

from horovod_topk.config import Settings
from horovod_topk.errors import ConfigError

ALONE = "world size 1: there is nobody to exchange with"  # why nothing is compressed


def elastic() -> bool:
    """Whether the number of ranks may change during the job (`horovodrun --min-np`)."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def check_elastic(config: Settings, *, in_graphs: bool = False) -> None:
    """Refuse exchanges that need a fixed number of ranks, in an elastic job.

    in_graphs: whether steps run in graphs that are not built again when ranks change.
    """
    exchange = config.exchange
    if not elastic():
        return
    if exchange in ("sharded", "hierarchical"):
        raise ConfigError(
            f"exchange={exchange!r} splits residuals among a fixed number of ranks, and this job "
            "is elastic",
            cure="Pass exchange='allgather', or run without --min-np and --max-np",
        )
    if in_graphs and exchange in ("reduce", "allreduce"):
        raise ConfigError(
            f"{type(config).__name__} with exchange={exchange!r} would build the number of ranks "
            "into TensorFlow's graphs, and this job is elastic",
            cure="Pass exchange='allgather', or run without --min-np and --max-np",
        )


def check_kept(manager: object | None, what: str) -> None:
    """Refuse a setting that ranks which join an elastic job would not know."""
    if elastic() and manager is None:
        raise ConfigError(
            f"{what} ranks that join this elastic job would not hear",
            cure="Pass the TopKEF to the job's state, as horovod_topk.elastic says",
        )


def check_steps_kept(config: Settings, manager: object | None) -> None:
    """Refuse settings that depend on past steps, which joining ranks would not know."""
    for setting in ("warmup", "schedule", "guard"):
        if getattr(config, setting) is not None:
            check_kept(manager, f"{setting}= counts steps, of which")


def check_all_exchange(process_set: Any) -> None:
    """Refuse an optimizer of only some of the ranks in an elastic state, which needs all ranks."""
    if process_set.process_set_id != 0:
        raise ConfigError(
            f"the optimizer's gradients are exchanged in process set {process_set.process_set_id}, "
            "and the ranks of an elastic state are all",
            cure="Leave process_set= out, or the TopKEF out of the elastic state",
        )


def why_inactive(process_set: Any) -> str | None:
    """Reason why nothing will be compressed among a process set's ranks; None: there is none."""
    if not process_set.included():
        return "this rank is not in the optimizer's process set"
    if process_set.size() == 1 and not elastic():
        return ALONE
    return None
