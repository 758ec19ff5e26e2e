"""`Buffer` and its views behave as NumPy's arrays and slices do: one memory, many names."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_topk.ops.tensorflow import Array, Buffer, TensorFlowOps

OPS = TensorFlowOps()
SIZE = 12


@st.composite
def stretches(draw: st.DrawFn, size: int = SIZE) -> tuple[int, int]:
    """A slice, possibly empty."""
    start = draw(st.integers(0, size))
    return start, draw(st.integers(start, size))


def numbers(start: int, count: int) -> Buffer:
    return Buffer(tf.range(start, start + count, dtype=tf.float32))


@settings(deadline=None)
@given(data=st.data(), pieces=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_writes_through_views_are_seen_everywhere(data: st.DataObject, pieces: list[int]) -> None:
    buffer = Buffer.joined([tf.zeros([size]) for size in [*pieces, SIZE]])
    size = sum(pieces) + SIZE
    expected = np.zeros(size, np.float32)
    names: list[tuple[Array, np.ndarray]] = [(buffer, expected)]
    for position in range(data.draw(st.integers(1, 5))):
        place, slice_ = data.draw(st.sampled_from(names))
        start, stop = data.draw(stretches(place.numel))
        view = OPS.view(place, start, stop)
        names.append((view, slice_[start:stop]))
        OPS.assign(view, numbers(100 * position, stop - start))
        slice_[start:stop] = np.arange(100 * position, 100 * position + stop - start)
        for array, copy in names:
            assert np.array_equal(array.value.numpy(), copy)


@settings(deadline=None)
@given(boundaries=st.lists(st.integers(0, SIZE)), written=stretches())
def test_splitting_and_copying_change_no_element(
    boundaries: list[int], written: tuple[int, int]
) -> None:
    buffer = numbers(1, SIZE).split(boundaries)
    copied = buffer.copy()
    copied.write(*written, tf.zeros([written[1] - written[0]]))
    expected = np.arange(1, SIZE + 1, dtype=np.float32)
    assert np.array_equal(buffer.value.numpy(), expected)
    expected[slice(*written)] = 0
    assert np.array_equal(copied.value.numpy(), expected)


def test_a_buffer_keeps_its_shape() -> None:
    buffer = Buffer(tf.zeros([3, 4]))
    OPS.assign(OPS.view(buffer, 5, 7), numbers(1, 2))
    assert buffer.value.numpy().tolist() == [[0] * 4, [0, 1, 2, 0], [0] * 4]
