"""A small GPT on the bytes of text files, by default the sources of Python's standard library.

    horovodrun -np 2 --gloo python examples/pytorch_bytelm.py --compression topk

It reports bits per byte on held-out files, a fifth of all. Another fifth is kept for choosing
settings. `--data DIRECTORY --suffix .txt` trains on files of your own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import harness
import horovod.torch as hvd
import source_files
import torch
import torch_harness
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR

CONTEXT = 64  # bytes a sequence
WIDTH = 96
HEADS = 4
LAYERS = 2


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm: [N, T, WIDTH] -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class ByteGPT(nn.Module):
    """Bytes [N, T] -> logits [N, T, 256] of the byte that follows each; 279 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1])
        return self.head(self.blocks(self.byte(text) + self.position(positions)))


def sequences(folder: Path, suffix: str, split: str) -> Tensor:
    """The split's files, one behind the other, as rows of CONTEXT + 1 bytes, [N, CONTEXT + 1]."""
    rows = in_rows(source_files.of_split(split, folder, suffix))
    if not len(rows):
        raise SystemExit(f"{folder}: no text for the {split} split in files ending in {suffix!r}")
    return rows


def in_rows(files: Iterable[Path]) -> Tensor:
    """Files, one behind the other, as rows of CONTEXT + 1 bytes; what fills no row is left out."""
    text = bytearray().join(path.read_bytes() for path in files)
    count = len(text) // (CONTEXT + 1)
    if not count:
        return torch.empty(0, CONTEXT + 1, dtype=torch.long)
    rows = torch.frombuffer(text, dtype=torch.uint8)[: count * (CONTEXT + 1)]
    return rows.view(count, CONTEXT + 1).long()


def spread_evenly(rows: Tensor, most: int = 512) -> Tensor:
    """At most so many of the rows, at equal distances."""
    return rows[:: math.ceil(len(rows) / most)]


def bits(model: nn.Module, text: Tensor) -> Tensor:
    """Bits for each byte of rows of text but the first: [N, T + 1] -> [N, T]."""
    logits, targets = model(text[:, :-1]), text[:, 1:]
    nats = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return nats.view_as(targets) / math.log(2)


def main() -> None:
    parser = harness.arguments(__doc__, steps=1000, batch_size=4, lr=1e-3, optimizer="adamw")
    harness.add_evaluation(parser, every=100)
    parser.add_argument(
        "--data",
        type=Path,
        default=source_files.STANDARD_LIBRARY,
        metavar="DIR",
        help="folder with the text files (default: Python's standard library)",
    )
    parser.add_argument(
        "--suffix", default=".py", help="ending of the files to read (default: .py)"
    )
    args = harness.parse(parser)

    harness.check_launcher(hvd)
    hvd.init(process_sets=harness.process_sets(args))
    torch.set_num_threads(harness.threads(hvd.local_size()))
    torch.manual_seed(args.seed)

    model = ByteGPT()
    optimizer = hvd.DistributedOptimizer(
        torch_harness.optimizer(args, model),
        named_parameters=model.named_parameters(),
        compression=torch_harness.compression(args),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = LambdaLR(optimizer, harness.warmup_cosine(args.steps))

    def scores(text: Tensor) -> Tensor:
        return bits(model, text).mean(dim=1)

    unseen = spread_evenly(sequences(args.data, args.suffix, args.evaluate_on))
    training = sequences(args.data, args.suffix, "training")

    run = torch_harness.Run(args, model, optimizer)
    batches = torch_harness.batches(training, batch_size=args.batch_size, seed=args.seed)
    for (text,) in run.steps(batches):
        optimizer.zero_grad()
        loss = bits(model, text).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if run.stepped(loss.item()):
            scored = torch_harness.mean_over_rows(
                lambda text: bits(model, text).mean(dim=1), unseen
            )
            run.evaluated(bits_per_byte=scored)
    run.finish()


if __name__ == "__main__":
    main()
