#!/usr/bin/env python3
"""Seconds of FSDP2's hop between two nodes of two ranks: PyTorch's HSDP beside compression.

    sudo scripts/netlab --hosts 2 --slots 2 --rate 1gbit -- scripts/benchmarks/fsdp.py 1gbit

starts two ranks on each emulated host, and keeps the seconds of every step in
docs/results/fsdp.json, by model and rate. `python scripts/page.py fsdp` writes the page. All
variants take turns in every round. What a variant takes more than one without a hop is what the hop
adds to a step.

With `--model linear` a batch of one row keeps compute small; `--model resnet50` computes nothing,
as its backward returns given gradients of a ResNet-50's shapes.

The authors' bias: they want compression to win.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/results/fsdp.json"
PORT, RANKS = 29555, 2  # of a host
WIDTH, UNITS = 1024, 24
MODELS = {
    "linear": f"{UNITS} linear units, {UNITS * WIDTH * (WIDTH + 1) / 1e6:.0f} million parameters",
    "resnet50": "The gradients of a ResNet-50, in units of 25 MiB",
}
NONE = "no hop"
KINDS = "float32", "bfloat16"  # of HSDP's reduction


def launch(arguments: list[str]) -> int:
    """Start torchrun on both hosts, and return the exit status of the first."""
    common = ["--nnodes", "2", "--nproc-per-node", str(RANKS), "--master-addr", "host1"]
    script = [*common, "--master-port", str(PORT), __file__, "--rank", *arguments]
    settings = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    given = [f"{key}={value}" for key, value in settings.items()]

    def command(node: int) -> list[str]:
        run = [sys.executable, "-m", "torch.distributed.run", "--node-rank", str(node)]
        return ["env", "-C", str(ROOT), *given, *run, *script]

    other = subprocess.Popen(["ssh", "host2", *command(1)], stdin=subprocess.DEVNULL)
    try:
        return subprocess.run(command(0), check=False).returncode
    finally:
        other.wait(timeout=60)


def model_of(name: str) -> Callable[[], tuple[Any, Any, Callable[[], object]]]:
    """Return a function that makes a model of units, its batch, and what draws its gradients."""
    import torch
    from torch import distributed as dist
    from torch import nn

    from horovod_topk.cli.bench.gradients import GivenGradients, Weights
    from horovod_topk.cli.models import specs_of

    def linear() -> tuple[Any, Any, Callable[[], object]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
        return model, torch.randn(1, WIDTH), lambda: None

    def given() -> tuple[Any, Any, Callable[[], object]]:
        module = GivenGradients(shared, dist.get_rank(), None, 0)
        return module.units(), torch.zeros(1, requires_grad=True), module.draw

    if name == "linear":
        return linear
    shared = Weights.of(specs_of(name), dist.get_rank())
    return given


def variants(mesh: Any, name: str) -> dict[str, Callable[[], Any]]:
    """Return, by the name of each variant, a function that builds its model and its step."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from horovod_topk.fsdp import TopKEF

    make = model_of(name)

    def made(own: Any, compressor: Any = None, kind: str = "float32") -> Callable[[], None]:
        model, batch, draw = make()
        policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, kind))
        for unit in model:
            fully_shard(unit, mesh=own, mp_policy=policy)
        fully_shard(model, mesh=own, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if compressor is not None:
            compressor.attach(model, optimizer, between=mesh["between"])

        def step() -> None:
            draw()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return step

    within = mesh["within"]
    return {
        NONE: lambda: made(within),
        "HSDP, float32": lambda: made(mesh),
        "HSDP, bfloat16": lambda: made(mesh, kind="bfloat16"),
        "TopKEF()": lambda: made(within, TopKEF(warmup=None)),
        "TopKEF(ratio=0.005)": lambda: made(within, TopKEF(ratio=0.005, warmup=None)),
    }


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant's steps on the slowest rank."""
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from horovod_topk.cli.timing import clocked, in_turns

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    names = "between", "within"
    mesh = init_device_mesh("cpu", (dist.get_world_size() // RANKS, RANKS), mesh_dim_names=names)
    steps = {name: make() for name, make in variants(mesh, name).items()}

    def slowest(step: Callable[[], object]) -> float:
        taken = torch.tensor(clocked(step, dist.barrier)())
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return taken.item()

    # The first round allocates.
    found = in_turns({n: partial(slowest, step) for n, step in steps.items()}, rounds, warm_up=1)
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    return found if rank == 0 else {}


def values(stored: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> dict[str, str]:
    """The page's tables, one for each model."""
    rounds = {str(len(t)) for rates in stored.values() for e in rates.values() for t in e.values()}
    tables = (f"{MODELS[model]}:\n\n{table(rates)}" for model, rates in stored.items())
    every = [found for rates in stored.values() for found in rates.values()]
    gains = {f"beside_{kind}": ranged([gain(f, f"HSDP, {kind}") for f in every]) for kind in KINDS}
    return {"tables": "\n\n".join(tables), "rounds": " and ".join(sorted(rounds)), **gains}


def gain(taken: Mapping[str, list[float]], beside: str) -> float:
    """How many times less the hop of TopKEF adds to a step than that of another variant."""
    other, own, base = (statistics.median(taken[name]) for name in (beside, "TopKEF()", NONE))
    return (other - base) / (own - base)


def ranged(gains: list[float]) -> str:
    """Write the range of some ratios."""
    return f"{min(gains):.0f} to {max(gains):.0f}"


def table(stored: Mapping[str, Mapping[str, list[float]]]) -> str:
    """A row for each variant, columns for each rate."""
    head = ["", *(f"{rate}, {each}" for rate in stored for each in ("step", "the hop adds"))]
    lines = [head, ["---"] * len(head)]
    for name in next(iter(stored.values())):
        row = [f"`{name}`" if "(" in name else name]
        for taken in stored.values():
            median, base = (statistics.median(taken[each]) for each in (name, NONE))
            row += [f"{median:.2f} s", f"{median - base:+.2f} s"]
        lines.append(row)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Measure one rate, and keep the seconds of every step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rate", help="name of the rate that scripts/netlab was given")
    parser.add_argument("--model", choices=MODELS, default="linear")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.rank:
        return launch(sys.argv[1:])
    if found := measure(args.model, args.rounds):
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known[args.model] = known.get(args.model, {}) | {args.rate: found}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        print(table({args.rate: found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
