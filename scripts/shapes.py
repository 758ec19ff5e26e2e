"""A known model's parameters without the model, for ranks that time or count an exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from horovod_topk.cli.models import known_specs


class Shapes(nn.Module):
    """Parameters of a known model, whose gradients cost nothing but their memory."""

    def __init__(self, model: str = "resnet50") -> None:
        super().__init__()
        shapes = [spec.shape for spec in reversed(known_specs(model))]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def loss(self, directions: Sequence[Tensor]) -> Tensor:
        """Linear: its gradients are the directions."""
        pairs = zip(self.weights, directions, strict=True)
        return torch.stack([(w * d).sum() for w, d in pairs]).sum()
