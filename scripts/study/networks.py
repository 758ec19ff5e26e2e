"""Six small networks of different kinds, on which the default setting is chosen.

Five predict the next byte of source files; one recognises from which part of two photographs a
patch is.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

BYTES = 256
WINDOW = 8  # bytes that the perceptrons see


class Perceptron(nn.Module):
    """The next byte from the embeddings of the last WINDOW (Bengio 2003): [N, T] -> [N, T, 256]."""

    def __init__(self, width: int, *hidden: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        sizes = [WINDOW * width, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], BYTES))

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the byte that follows each."""
        windows = pad(text, (WINDOW - 1, 0)).unfold(1, WINDOW, 1)
        return self.layers(self.byte(windows).flatten(2))


class Recurrent(nn.Module):
    """A GRU over bytes: [N, T] -> [N, T, 256]."""

    def __init__(self, width: int = 64, hidden: int = 192) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.recurrent = nn.GRU(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the byte that follows each."""
        return self.head(self.recurrent(self.byte(text))[0])


class CausalConvolutions(nn.Module):
    """Dilated convolutions over the bytes so far: [N, T] -> [N, T, 256]."""

    def __init__(self, width: int = 96, dilations: tuple[int, ...] = (1, 2, 4, 8)) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, width, kernel_size=3, dilation=d) for d in dilations
        )
        self.head = nn.Linear(width, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the byte that follows each."""
        x = self.byte(text).transpose(1, 2)
        for layer in self.layers:
            reach = 2 * layer.dilation[0]
            x = x + torch.nn.functional.gelu(layer(pad(x, (reach, 0))))
        return self.head(x.transpose(1, 2))


class Residual(nn.Module):
    """A residual network with batch norm: [N, 3, 16, 16] -> [N, classes]."""

    def __init__(self, classes: int, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(before, after, 1 if i == 0 else 2)
                for i, (before, after) in enumerate(pairs)
            )
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits of classes."""
        return self.head(self.blocks(self.stem(pictures)).mean(dim=(2, 3)))


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut (He 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.shortcut = (
            nn.Identity()
            if (before, stride) == (after, 1)
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, before, H, W] -> [N, after, H / stride, W / stride]."""
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.shortcut(x))
