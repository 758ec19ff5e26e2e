"""The model and the data of the examples that train a GPT on bytes: no launcher, no ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import source_files
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

CONTEXT = 64  # bytes a sequence


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm: [N, T, width] -> same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class ByteGPT(nn.Module):
    """Bytes [N, T] -> logits [N, T, 256] of the byte that follows each; 279 thousand parameters."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
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
