"""Methods other than Top-K in TensorFlow: dense in a fixed order, and one of two rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from oracle.backends import NUMPY, TENSORFLOW
from oracle.dithered import Dithered
from oracle.two_rounds import TwoRounds
from oracle.world import World
from proof import assert_ranks_equal, ranks_equal
from tapes import Linear, Perceptron, batch, batch_size, noise, step_of

import horovod_topk.tensorflow
from horovod_topk import checkpoint
from horovod_topk.core.codec.payload_codec import PayloadCodec
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.state.state_dict import parts_of
from horovod_topk.errors import PayloadError
from horovod_topk.methods import METHODS, Method, TernGrad

SHAPES = [(60, 50), (7,), (515,)]
METHODS |= {"TwoRounds": TwoRounds, "Dithered": Dithered}
WAYS = pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])


def gradients(rank: int, step: int, shapes: Any = SHAPES) -> list[Any]:
    return [noise(rank, 10 * step + i, shape) for i, shape in enumerate(shapes)]


@pytest.mark.one_in(2)
@pytest.mark.everywhere(one_in=3)
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize(
    ("exchange", "values"),
    [("allreduce", "float32"), *(("sharded", v) for v in ("float32", "bfloat16", "float16"))],
)
def test_dense_is_the_mean_in_rank_order(exchange: str, values: str) -> None:
    name = f"{values}-{exchange}"
    compression = horovod_topk.tensorflow.Dense(values=values, exchange=exchange, name=name)
    model = Linear(SHAPES)
    sent, got = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for step in range(4):
        exchanged = model.exchange(compression, gradients(hvd.rank(), step))
        ranks = [gradients(rank, step) for rank in range(hvd.size())]
        total = [np.float32(0) * each for each in ranks[0]]
        for one in ranks:
            total = [np.asarray(a + b, "f4") for a, b in zip(total, one, strict=True)]
        mean = [each * np.float32(1 / hvd.size()) for each in total]
        if values == "float32" and (exchange == "sharded" or hvd.size() == 2):
            assert all(map(np.array_equal, exchanged, mean))
        sent = [a + b for a, b in zip(sent, mean, strict=True)]
        got = [a + b for a, b in zip(got, exchanged, strict=True)]
    error = max(np.abs(a - b).max() for a, b in zip(sent, got, strict=True))
    assert error < {"float32": 1e-6, "float16": 2e-2, "bfloat16": 2e-1}[values]
    rounded = compression.stats().residual_norm > 0
    assert rounded == (values != "float32")


@pytest.mark.slow
@pytest.mark.world_size(2, 3, 4)
def test_rounds_are_the_same_by_every_exchange() -> None:
    """To the bit where the order of addition is fixed, or two ranks have only one."""
    found = {}
    for exchange in ("reduce", "allgather", "allreduce"):
        compression, model = horovod_topk.tensorflow.RandomK(exchange=exchange), Linear(SHAPES)
        found[exchange] = [
            each.tobytes()
            for step in range(4)
            for each in model.exchange(compression, gradients(hvd.rank(), step), graph=True)
        ]
        assert_ranks_equal(model.exchange(compression, gradients(hvd.rank(), 4), graph=True))
        assert compression.stats().exchange == exchange
    assert found["allgather"] == found["reduce"]
    if hvd.size() == 2:
        assert found["allreduce"] == found["reduce"]


def arrays_in(state: Any) -> dict[str, bytes]:
    """Residuals of a state dict, and what it has beside them: owners' residuals, method state."""
    parts = {"": state, **{part: state[part] for part in parts_of(state)}}
    return {
        f"{part}.{name}": each.numpy().tobytes()
        for part, holder in parts.items()
        for name, each in holder["residuals"].items()
    }


@pytest.mark.one_in(4, first=2)
@pytest.mark.everywhere(one_in=4)
@WAYS
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize(
    "method",
    [
        "Dense",
        "TwoRounds",
        "RandomK",
        "QSGD",
        "SignSGD",
        "PowerSGD",
        "OneBit",
        "ByteGrad",
        "Threshold",
        "TernGrad",
    ],
)
def test_a_checkpoint_goes_on_and_a_nan_changes_nothing(
    method: str, graph: bool, tmp_path: Path
) -> None:
    folder = hvd.broadcast_object(tmp_path, root_rank=0, name="folder")
    make = getattr(horovod_topk.tensorflow, method)
    first, second = (make(name=f"{method}.{graph}.{i}") for i in range(2))
    model, other = Linear(SHAPES), Linear(SHAPES)
    for step in range(3):
        model.exchange(first, gradients(hvd.rank(), step), graph=graph)
    checkpoint.save(folder, first)
    checkpoint.load(folder, second)
    for step in range(3, 6):
        if step == 4:
            bad = [np.array(each) for each in gradients(hvd.rank(), 99)]
            bad[0][3, 3] = np.nan if hvd.rank() == 1 else 0
            before = arrays_in(second.state_dict())
            exchanged = other.exchange(second, [tf.constant(each) for each in bad], graph=graph)
            assert np.isnan(exchanged[0]).all()
            assert np.isfinite(exchanged[1]).all()
            assert arrays_in(second.state_dict()) == before
        expected = model.exchange(first, gradients(hvd.rank(), step), graph=graph)
        again = other.exchange(second, gradients(hvd.rank(), step), graph=graph)
        assert all(map(np.array_equal, again, expected))
    assert second.stats().rolled_back == 1
    assert arrays_in(second.state_dict()) == arrays_in(first.state_dict())
    assert_ranks_equal(expected)


@pytest.mark.one_in(2)
@WAYS
@pytest.mark.world_size(2, 3, 4)
def test_two_rounds_are_those_of_simulated_ranks(graph: bool) -> None:
    """To the bit: the same sums, residuals and state, shared and of each rank."""
    compression, model = horovod_topk.tensorflow.TwoRounds(name=f"world.{graph}"), Linear(SHAPES)
    names: list[str] = []
    for step in range(4):
        everyone = [gradients(rank, step) for rank in range(hvd.size())]
        exchanged = model.exchange(compression, everyone[hvd.rank()], graph=graph)
        if not names:
            names = list(compression.state_dict()["residuals"])
            specs = [TensorSpec(n, s, "float32") for n, s in zip(names, SHAPES, strict=True)]
            world = World(make_plan(specs, TwoRounds()), hvd.size(), TENSORFLOW)
        named = [{n: g.numpy() for n, g in zip(names, one, strict=True)} for one in everyone]
        expected = world.step(named)[hvd.rank()]
        for name, mine in zip(names, exchanged, strict=True):
            np.testing.assert_allclose(mine, expected[name], rtol=1e-5, atol=1e-6)
    ours, theirs = compression.state_dict(), world.ranks[hvd.rank()].state_dict()
    assert parts_of(ours) == parts_of(theirs) == ["state.q", "state.steps"]
    for part in parts_of(ours):
        for name, mine in ours[part]["residuals"].items():
            there = TENSORFLOW.numpy(theirs[part]["residuals"][name])
            np.testing.assert_allclose(mine.numpy(), there, rtol=1e-4, atol=1e-5)
        assert ours[part]["shared"] == theirs[part]["shared"] == (part == "state.q")


@pytest.mark.one_in(8)
@WAYS
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
@pytest.mark.parametrize("method", [Dithered, TernGrad])
def test_random_numbers_are_those_of_simulated_ranks(
    method: type[Method], exchange: str, graph: bool
) -> None:
    """To the bit, with NumPy: the count of steps that they follow from is a tensor here."""
    settings: Any = {"exchange": exchange, "min_numel": 8}
    make = getattr(horovod_topk.tensorflow, method.__name__)
    compression = make(name=f"drawn.{method.__name__}.{exchange}.{graph}", **settings)
    model, names = Linear(SHAPES), list[str]()
    for step in (0, 1, 99, 2):
        factor = np.nan if step == 99 and hvd.rank() == 1 else 1.0
        mine = [factor * each for each in gradients(hvd.rank(), step)]
        exchanged = model.exchange(compression, mine, graph=graph)
        if not names:
            names = list(compression.state_dict()["residuals"])
            specs = [TensorSpec(n, s, "float32") for n, s in zip(names, SHAPES, strict=True)]
            world = World(make_plan(specs, method(**settings)), hvd.size(), NUMPY)
        if step != 99:  # that one is rolled back, and its random numbers are drawn again
            everyone = [gradients(rank, step) for rank in range(hvd.size())]
            named = [{n: g.numpy() for n, g in zip(names, one, strict=True)} for one in everyone]
            expected = world.step(named)[hvd.rank()]
            assert all(map(np.array_equal, exchanged, (expected[name] for name in names)))
    assert compression.stats().rolled_back == 1


@pytest.mark.one_in(2, first=1)
@WAYS
@pytest.mark.world_size(2, 3, 4)
def test_two_rounds_train_through_a_tape(graph: bool) -> None:
    """With a second trace for the last batch, residuals and state go on."""
    model = Perceptron()
    compression = horovod_topk.tensorflow.TwoRounds(min_numel=16, columns=3)
    step = step_of(model, compression)
    run = tf.function(step) if graph else step
    before = [variable.numpy() for variable in model.variables]
    for position in range(10):
        run(*batch(position, batch_size(position)))
    assert_ranks_equal(model.variables)
    assert not np.array_equal(before[0], model.variables[0])
    assert (compression.stats().steps, compression.stats().residual_norm > 0) == (10, True)


SMALL = {
    "of a sum": ("TwoRounds", {}, (10, 8)),
    "of a shard": ("Dense", {}, (7,)),
    "of a node's sum": ("TopKEF", {"exchange": "hierarchical"}, (7,)),
}


@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("owner", SMALL)
def test_a_bucket_of_which_some_rank_owns_nothing(owner: str) -> None:
    """TensorFlow must neither send what is constant while it builds a graph, nor leave it out."""
    name, settings, shape = SMALL[owner]
    compression = getattr(horovod_topk.tensorflow, name)(name=f"small.{name}", **settings)
    model = Linear([shape])
    for step in range(3):
        exchanged = model.exchange(compression, [noise(hvd.rank(), step, shape)], graph=True)
        assert_ranks_equal(exchanged)
    assert compression.stats().steps == 3


@pytest.mark.one_in(4)
@WAYS
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("leg", range(4))
def test_a_rank_that_cannot_read_a_payload_ends_the_step_for_all(
    leg: int, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """leg: scatter and gather of the first round, and of the second."""
    compression = horovod_topk.tensorflow.TwoRounds(name=f"fails.{graph}.{leg}")
    model, failing = Linear([(10, 8), (16, 8)]), hvd.rank() == 1
    check, legs = PayloadCodec._check, list[int]()

    def take(step: int) -> list[Any]:
        mine = gradients(hvd.rank(), step, [(10, 8), (16, 8)])
        return model.exchange(compression, mine, graph=graph)

    def refuse(*args: Any) -> list[bool]:
        legs.append(len(legs))
        if len(legs) == 4 + leg + 1:  # in the second step
            raise PayloadError("the test refuses it", cure="None")
        return check(*args)

    if failing:
        monkeypatch.setattr(PayloadCodec, "_check", staticmethod(refuse))
    take(0)
    before = arrays_in(compression.state_dict())
    if failing:
        with pytest.raises(tf.errors.OpError if graph else PayloadError, match="refuses it"):
            take(1)
    else:
        assert all(np.isnan(each).all() == (leg < 3) for each in take(1))
    if failing or leg < 3:  # when the last leg fails, the others have all that they need
        assert arrays_in(compression.state_dict()) == before
    exchanged = take(2)
    assert leg == 3 or ranks_equal(exchanged)
