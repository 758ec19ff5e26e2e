"""What is trained: the digits on two ranks, plain and with each of the things people add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

RANKS, BATCH_SIZE, STEPS = 2, 32, 1000  # as in docs/accuracy.md
SEEDS = (0, 1, 2, 3, 4)
RATIOS = (0.01, 0.001)
NORM = 1.0  # that gradients are clipped to
SPIKE_EVERY, SPIKE = 100, 100.0  # steps between two; how many times too large a gradient is
IDLE_EVERY = 4
WARMUP = STEPS // 10
RESTART_AT = STEPS // 2


@dataclass(frozen=True)
class Loop:
    """A training loop; what dense and TopKEF have in common."""

    optimizer: str = "sgd"  # sgd, nesterov or adamw
    precision: str = "float32"  # of activations; float16 has a loss scale
    clip: bool = False  # to `NORM`, after the exchange
    spikes: bool = False  # on the last rank
    shards: str = "equal"  # or skewed: each rank has five or six of the ten digits
    idle: bool = False  # the last rank has no data in every `IDLE_EVERY`th step


LOOPS: dict[str, Loop] = {
    "plain": Loop(),
    "nesterov": Loop(optimizer="nesterov"),
    "clipped": Loop(clip=True),
    "spikes": Loop(spikes=True),
    "spikes-clipped": Loop(spikes=True, clip=True),
    "bfloat16": Loop(precision="bfloat16"),
    "float16": Loop(precision="float16"),
    "skewed": Loop(shards="skewed"),
    "idle": Loop(idle=True),
    "adamw": Loop(optimizer="adamw"),
}


@dataclass(frozen=True)
class Way:
    """TopKEF in a loop, and the loop in which dense is compared with it."""

    title: str
    loop: str = "plain"  # of TopKEF
    dense: str = "plain"
    settings: Mapping[str, object] = field(default_factory=dict)  # of TopKEF, beside the ratio
    restart: bool = False  # from a checkpoint, at `RESTART_AT`


MOMENTUM = {"momentum": "optimizer"}
CLIPPED = {"clip_norm": NORM}
CORRECTED = '`momentum="optimizer"`'
WAYS: dict[str, Way] = {
    "plain": Way("SGD, momentum 0.9"),
    "restart": Way(f"ended at step {RESTART_AT}, restarted from its checkpoint", restart=True),
    "momentum": Way(CORRECTED, settings=MOMENTUM),
    "nesterov": Way("Nesterov's momentum", "nesterov", "nesterov"),
    "nesterov-momentum": Way(f"Nesterov's, {CORRECTED}", "nesterov", "nesterov", MOMENTUM),
    "warmup": Way(f"`warmup={WARMUP}`", settings={"warmup": WARMUP}),
    "head": Way("`ratios={'8.*': 'dense'}`, the head", settings={"ratios": {"8.*": "dense"}}),
    "clipped": Way(f"clipped to {NORM:g} after the exchange", "clipped", "clipped"),
    "clip-norm": Way(f"`clip_norm={NORM:g}`", "plain", "clipped", CLIPPED),
    "clip-norm-momentum": Way(
        f"`clip_norm={NORM:g}`, {CORRECTED}", "plain", "clipped", CLIPPED | MOMENTUM
    ),
    "spikes": Way("spikes", "spikes", "spikes"),
    "spikes-clipped": Way("spikes, clipped after", "spikes-clipped", "spikes-clipped"),
    "spikes-clip-norm": Way("spikes, `clip_norm`", "spikes", "spikes-clipped", CLIPPED),
    "bfloat16": Way("autocast to bfloat16", "bfloat16", "bfloat16"),
    "float16": Way("autocast to float16, `grad_scaler=`", "float16", "float16"),
    "float16-momentum": Way(f"float16, {CORRECTED}", "float16", "float16", MOMENTUM),
    "skewed": Way("skewed shards", "skewed", "skewed"),
    "skewed-momentum": Way(f"skewed shards, {CORRECTED}", "skewed", "skewed", MOMENTUM),
    "idle": Way(f"a rank without data in every {IDLE_EVERY}th step", "idle", "idle"),
    "idle-momentum": Way(f"a rank without data, {CORRECTED}", "idle", "idle", MOMENTUM),
    "adamw": Way("AdamW", "adamw", "adamw"),
    "adamw-momentum": Way(f"AdamW, {CORRECTED}", "adamw", "adamw", MOMENTUM),
}


@dataclass(frozen=True)
class Trial:
    """One run: all that tells it from the others."""

    name: str  # of WAYS; where there is no ratio, of LOOPS
    ratio: float | None  # None: dense
    seed: int

    @property
    def loop(self) -> Loop:
        """What it trains with."""
        return LOOPS[self.name if self.ratio is None else WAYS[self.name].loop]

    @property
    def way(self) -> Way | None:
        """TopKEF's; None: dense."""
        return None if self.ratio is None else WAYS[self.name]


def trials() -> list[Trial]:
    """All runs, seed by seed."""
    names = [(name, None) for name in LOOPS] + list(product(WAYS, RATIOS))
    return [Trial(name, ratio, seed) for seed in SEEDS for name, ratio in names]
