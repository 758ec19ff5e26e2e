"""A rank of `local_steps.py`: takes all variants in turns, and rank 0 writes what it measured."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.local_steps import ALONE, BFLOAT16, EVERY_STEP, FLOAT16, LOCAL, PARTS
from cluster.host import INTERFACE
from horovod_topk.cli.bench.nic import scheduled
from horovod_topk.ddp import Dense, LocalSteps, TopKEF

WARM_UP = 1  # steps: memory is allocated
WIDTH, HEADS, LAYERS, CONTEXT = 512, 8, 8, 64


class GPT(nn.Module):
    """Bytes [N, CONTEXT] -> logits [N, CONTEXT, 256]; 25.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        settings = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **settings) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)
        self.mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def forward(self, text: Tensor) -> Tensor:
        """Score the byte that follows each."""
        x = self.byte(text) + self.position.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        wrap: from model and optimizer to those that a training loop uses, and to what has the
            compressor's state, or None.
        steps: number of steps that are timed at once.
        offset: number of steps of a round that come before them.
    """

    wrap: Callable[[nn.Module, Any], tuple[nn.Module, Any, Any]]
    steps: int
    offset: int = 0


def variants(every: int) -> dict[str, Variant]:
    """Every variant by its name in the table."""

    def alone(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any, Any]:
        return model, optimizer, None

    def hook(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any, Any]:
        wrapped = DistributedDataParallel(model, init_sync=False)
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapped, optimizer, None

    def each_step(compressor: Any) -> Any:
        def wrap(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any, Any]:
            wrapped = DistributedDataParallel(model, init_sync=False)
            compressor.attach(wrapped, optimizer)
            return wrapped, optimizer, wrapped

        return wrap

    def local(compression: Any, **settings: Any) -> Any:
        def wrap(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any, Any]:
            named = model.named_parameters()
            asked = {"every": every, "compression": compression, **settings}
            outer = LocalSteps(optimizer, named, **asked)
            return model, outer, outer

        return wrap

    sparse = TopKEF(ratio=1 / 64, momentum=0)
    delay = every // 3
    few, some = max(1, every // 15), max(1, every // 3)
    return {
        ALONE: Variant(alone, every),
        FLOAT16: Variant(hook, few),
        BFLOAT16: Variant(each_step(Dense(values="bfloat16")), few),
        EVERY_STEP: Variant(each_step(TopKEF(warmup=None)), some),
        LOCAL: Variant(local(sparse, decay=0.95), every),
        # The exchange starts and ends within the steps that are timed.
        f"local steps, `delay={delay}`": Variant(
            local(sparse, decay=0.95, delay=delay), every, every // 2
        ),
        "local steps, `Dense()`": Variant(local(Dense()), every),
    }


def measure(variant: Variant, rows: int) -> dict[str, float]:
    """Build a variant, and measure its steps: the seconds of the slowest rank, a step."""
    torch.manual_seed(0)
    plain = GPT()
    model, optimizer, owner = variant.wrap(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    text = torch.randint(256, (rows, CONTEXT + 1))

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            logits = model(text[:, :-1])
            cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()

    def counted() -> Tensor:
        stats = None if owner is None else TopKEF.of(owner).stats()
        parts = [0.0 if stats is None else getattr(stats, each) for each in PARTS]
        sent = scheduled(INTERFACE)
        assert sent is not None
        return torch.tensor([sent.bytes, *parts], dtype=torch.float64)

    train(WARM_UP)
    if isinstance(optimizer, LocalSteps):
        optimizer.synchronize()  # allocates, and begins a round
    train(variant.offset)
    dist.barrier()
    before, began = counted(), time.perf_counter()
    train(variant.steps)
    slowest = torch.tensor(time.perf_counter() - began)
    means = counted() - before
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(means)
    sent, *parts = (means / dist.get_world_size() / variant.steps).tolist()
    exchange = sent if owner is None else TopKEF.of(owner).stats().sent_bytes
    return {
        "seconds": slowest.item() / variant.steps,
        "bytes": sent,
        "exchange": exchange,
        **dict(zip(PARTS, parts, strict=True)),
    }


def main() -> None:
    """Take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rounds", "rows", "every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--results", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, dict[str, list[float]]] = {name: {} for name in variants(args.every)}
    for _ in range(args.rounds):
        for name in found:
            measured = measure(variants(args.every)[name], args.rows)
            gc.collect()
            for key, value in measured.items():
                found[name].setdefault(key, []).append(value)
            if dist.get_rank() == 0:
                print(f"{name}: {measured['seconds']:.2f} s a step", flush=True)
                write(args, found)
    dist.barrier()
    dist.destroy_process_group()


def write(args: argparse.Namespace, found: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Keep what was measured so far."""
    setting = {
        "parameters": sum(p.numel() for p in GPT().parameters()),
        "sequences": args.rows,
        "context": CONTEXT,
        "every": args.every,
        "ranks": dist.get_world_size(),
    }
    known = json.loads(args.results.read_text()) if args.results.exists() else {}
    known[str(args.rows)] = {"setting": setting, "variants": found}
    args.results.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
