"""The implementations of `horovod_topk.ops.Ops` under test, each with a way in and out of NumPy.

An implementation joins the contract suite, the laws and the golden bytes by adding a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from horovod_topk.ops import Ops
from horovod_topk.ops.numpy import NumpyOps
from horovod_topk.ops.torch import DTYPES, TorchOps


@dataclass(frozen=True)
class Backend:
    """One row."""

    name: str
    ops: Ops[Any]
    array: Callable[[NDArray[Any], str], Any]  # (values, dtype); keeps a transposed layout
    numpy: Callable[[Any], NDArray[Any]]  # a copy; bfloat16 comes back as float32
    gradient_dtypes: tuple[str, ...]


def _to_torch(values: NDArray[Any], dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.array(values, order="K")).to(DTYPES[dtype])


def _from_torch(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    return tensor.numpy().copy()


NUMPY = Backend(
    "numpy",
    NumpyOps(),
    lambda values, dtype: np.array(values, dtype, order="K"),
    np.copy,
    ("float16", "float32", "float64"),
)
TORCH = Backend(
    "torch", TorchOps(), _to_torch, _from_torch, ("float16", "bfloat16", "float32", "float64")
)
BACKENDS = (NUMPY, TORCH)

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
