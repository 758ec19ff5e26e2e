"""Gram-Schmidt orthonormalisation of low-rank factors, by verbs of `Ops`.

Orthonormalisation has the same bits in every framework: scalar products are summed in float64 in
the order of `Ops.sums`, and other operations are elementwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod_topk.ops.protocol import Ops

Array = Any  # an array of the framework that `ops` is for

DEPENDENT = 1e-5  # a row with a smaller share of its length left is linearly dependent


def orthonormal(ops: Ops[Any], rows: Array, count: int) -> Array:
    """`Ops.orthonormal`."""
    size, basis = ops.numel(rows) // count, list[Array]()
    for i in range(count):
        row = ops.view(rows, i * size, (i + 1) * size)
        row = ops.divided(row, ops.largest(abs(row), size))  # so that squares do not underflow
        before = _length(ops, row)
        for _ in range(2):  # the second pass removes rounding errors
            for other in basis:
                row = row - other * ops.spread(_dot(ops, other, row), size, size)
        length = _length(ops, row)
        is_new = ops.cast(length > before * DEPENDENT, ops.dtype(row))
        basis.append(ops.divided(row, length) * ops.spread(is_new, size, size))
    return ops.joined(basis)


def _length(ops: Ops[Any], row: Array) -> Array:
    """Return the Euclidean norm of a row, [1]."""
    wide = ops.cast(row, "float64")
    return ops.cast(ops.root(ops.sums(wide * wide, ops.numel(row))), ops.dtype(row))


def _dot(ops: Ops[Any], left: Array, right: Array) -> Array:
    """Return the scalar product of two rows, [1]."""
    products = ops.cast(left, "float64") * ops.cast(right, "float64")
    return ops.cast(ops.sums(products, ops.numel(left)), ops.dtype(left))
