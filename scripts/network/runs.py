"""The runs of `make bench-network`."""

from __future__ import annotations

from dataclasses import dataclass

HOSTS = 4
MODEL = "resnet50"
RATES = ("100mbit", "300mbit", "1gbit")
FAST = RATES[-1]
METHODS = (
    "dense",
    "dense-waiting",
    "fp16",
    "ddp",
    "ddp-fp16",
    "powersgd",
    "topk-plain",
    "topk",
    "topk-int8",
    "topk-int8-sharded",
    "topk-int8-sampled",
    "ddp+topk-int8",
    "ddp+topk-int8-sharded",
)
FEW = (
    "dense",
    "fp16",
    "ddp",
    "powersgd",
    "topk-int8",
)  # for runs about something other than bandwidth
WITH_IDLE = ("dense", "fp16", "ddp", "topk-int8")  # torch's PowerSGD may abort there


@dataclass(frozen=True)
class Run:
    """One job of `horovod-topk bench`."""

    rate: str  # of each host's link
    compute: str | None = None  # simulated backward
    idle: int = 0  # parameters that never get a gradient

    @property
    def arguments(self) -> list[str]:
        """Of the command, without the path of its results."""
        plain = self.compute is None and not self.idle
        found = ["--model", MODEL, "--rate", self.rate]
        methods = METHODS if plain else WITH_IDLE if self.idle else FEW
        found += ["--methods", ",".join(methods)]
        found += ["--compute", self.compute] if self.compute else []
        return [*found, "--idle-parameters", str(self.idle)] if self.idle else found


RUNS = {
    **{rate: Run(rate) for rate in RATES},
    "sleep": Run(FAST, compute="sleep:0.5"),
    "cpu": Run(FAST, compute="cpu:0.25"),
    "idle": Run(FAST, idle=8),
}
