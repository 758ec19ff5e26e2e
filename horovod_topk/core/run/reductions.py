"""Horovod's `op=` as the name of a reduction, for any framework."""

from __future__ import annotations

from typing import Any

from horovod_topk.errors import UnsupportedOperationError


def reduction_of(op: object, hvd: Any) -> str:
    """The name of Horovod's reduction in plans: "average" or "sum".

    Args:
        op: one of Horovod's reductions, which are numbers.
        hvd: `horovod.torch` or `horovod.tensorflow`.

    Raises:
        UnsupportedOperationError: it is neither an average nor a sum.
    """
    reductions = {hvd.Average: "average", hvd.Sum: "sum"}
    if op not in reductions:
        raise UnsupportedOperationError(
            f"op={_name(op, hvd)} combines dense gradients in a way that sparse payloads cannot "
            "express",
            cure="Use op=hvd.Average or op=hvd.Sum with TopKEF, or another op with "
            "Compression.none",
        )
    return reductions[op]


def _name(op: object, hvd: Any) -> str:
    names = ("Adasum", "Min", "Max", "Product")
    return next((f"hvd.{name}" for name in names if op == getattr(hvd, name, None)), repr(op))
