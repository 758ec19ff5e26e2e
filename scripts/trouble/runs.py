"""The jobs, each with one kind of trouble, and the methods that they compare."""

from __future__ import annotations

from dataclasses import dataclass

HOSTS = 4
RATE = "100mbit"  # of each host's link
STEPS = 150
COMPUTE = 0.02  # seconds that a rank sleeps in a step, in place of a model's compute
MARK = 10  # steps between two records of weights, residuals and accuracy
WAYS = ("dense", "TopKEF", "TopKEF int8")


@dataclass(frozen=True)
class Run:
    """One job; all methods take turns in it."""

    title: str
    loss: float = 0.0  # share of the packets
    slow: float = 1.0  # of the last rank: its compute, as a multiple of the others'
    rto_min: str | None = None  # TCP's least time-out before it sends again; None: 200ms
    limit_seconds: float = 200.0  # of training; then all ranks stop


RUNS = {
    "none": Run("none"),
    "slow": Run("rank 3 computes 10 times longer", slow=10.0),
    "loss-1": Run("1% of the packets lost", loss=0.01),
    "loss-10": Run("10% of the packets lost", loss=0.1),
    "loss-1-soon": Run("1% lost, sent again after 5 ms", loss=0.01, rto_min="5ms"),
    "loss-10-soon": Run("10% lost, sent again after 5 ms", loss=0.1, rto_min="5ms"),
    "none-again": Run("none, measured once more"),
}
PLAIN = "none"  # what the others are compared with
EXAMPLE = "examples/pytorch_digits.py"
BATCH_SIZE, LR, SEED = 16, 0.1, 0
