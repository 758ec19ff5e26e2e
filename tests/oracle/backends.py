"""The implementations of `horovod_topk.ops.Ops` under test, each with a way in and out of NumPy.

An implementation joins the contract suite, the laws and the golden bytes by adding a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from numpy.typing import NDArray

from horovod_topk.ops import Ops
from horovod_topk.ops.tensorflow import Buffer, TensorFlowOps
from horovod_topk.ops.torch import DTYPES, TorchOps
from oracle.graph import GraphOps
from oracle.numpy_ops import NumpyOps


@dataclass(frozen=True)
class Backend:
    """One row."""

    name: str
    ops: Ops[Any]
    array: Callable[[NDArray[Any], str], Any]  # (values, dtype); keeps a transposed layout
    numpy: Callable[[Any], NDArray[Any]]  # a copy; bfloat16 comes back as float32
    gradient_dtypes: tuple[str, ...]
    denormals: bool = True  # whether arithmetic keeps them; TensorFlow's takes them for zero


def _to_torch(values: NDArray[Any], dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.array(values, order="K")).to(DTYPES[dtype])


def _from_torch(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    return tensor.numpy().copy()


def _to_tensorflow(values: NDArray[Any], dtype: str) -> Buffer:
    return Buffer(tf.cast(tf.constant(values), dtype))


def _from_tensorflow(array: Any) -> NDArray[Any]:
    tensor = array.value
    tensor = tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
    return np.array(tensor.numpy())


NUMPY = Backend(
    "numpy",
    NumpyOps(),
    lambda values, dtype: np.array(values, dtype, order="K"),
    np.copy,
    ("float16", "float32", "float64"),
)
TORCH = Backend(
    "torch",
    TorchOps(kernels=False),
    _to_torch,
    _from_torch,
    ("float16", "bfloat16", "float32", "float64"),
)
NATIVE = replace(TORCH, name="native", ops=TorchOps())
TENSORFLOW = Backend(
    "tensorflow",
    TensorFlowOps(kernels=False),
    _to_tensorflow,
    _from_tensorflow,
    TORCH.gradient_dtypes,
    denormals=False,
)
OPERATIONS = replace(TENSORFLOW, name="operations", ops=TensorFlowOps())
GRAPH = replace(TENSORFLOW, name="graph", ops=GraphOps())


def each_of(*backends: Backend, rest: Sequence[Backend] = ()) -> pytest.MarkDecorator:
    """A test for each implementation; the fast tier has none of `rest`."""
    late = [pytest.param(each, marks=pytest.mark.slow) for each in rest]
    return pytest.mark.parametrize("backend", [*backends, *late], ids=lambda each: each.name)


each_backend = each_of(NUMPY, NATIVE, rest=[TORCH])  # for laws that try hundreds of jobs
each_framework = each_of(NUMPY, NATIVE, OPERATIONS, rest=[TORCH, TENSORFLOW])
each_way = each_of(NUMPY, TORCH, TENSORFLOW, rest=[GRAPH])  # a graph for every call of every verb
