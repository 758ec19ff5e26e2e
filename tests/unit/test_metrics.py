"""Metrics: their names, what they say of a step, and how they are written and served."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle.backends import NUMPY, Backend, each_backend
from oracle.world import SPECS, World, gradients

from horovod_topk.core.exchange.probe import compare
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.run.stats import StepCounters
from horovod_topk.errors import ConfigError
from horovod_topk.methods.dense import Dense
from horovod_topk.methods.topk import TopK
from horovod_topk.metrics import FIELDS, JsonLines, as_dictionary

prometheus = pytest.importorskip("horovod_topk.metrics.prometheus")

STEP = StepCounters(
    step=7,
    committed=True,
    selected=10,
    payload_bytes=100,
    sent_bytes=100,
    dense_bytes=3000,
    between_bytes=None,
    node_bytes=None,
    flagged=(),
    level=0.02,
    compress_seconds=0.01,
    exchange_seconds=0.2,
    exposed_seconds=0.1,
    decompress_seconds=0.02,
    residual_norm_ratio=2.5,
    memory_bytes=4096,
)


def test_writers_that_are_closed_open_again(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "rank0.jsonl")
    for step in (1, 2):
        lines(replace(STEP, step=step))
        lines.close()
    written = (tmp_path / "rank0.jsonl").read_text().splitlines()
    assert [json.loads(each)["step"] for each in written] == [1, 2]
    tensorboard = pytest.importorskip("horovod_topk.metrics.tensorboard")
    board = tensorboard.TensorBoard(tmp_path / "board")
    for step in (1, 2):
        board(replace(STEP, step=step))
        board.close()
        board.close()
    assert len(list((tmp_path / "board").iterdir())) == 2
    served = prometheus.Prometheus(0, 0)
    served.close()
    served(STEP)
    served.close()
    assert served.registry.get_sample_value("hvdtopk_sent_bytes_total", {"rank": "0"}) == 100


# What a step measures.


@each_backend
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_a_sampled_step_says_what_its_arrays_say(backend: Backend, exchange: str) -> None:
    """One step later: no device is waited for."""
    config = TopK(0.05, min_numel=0, exchange=exchange, values="int8")
    world, seen = World(make_plan(SPECS, config), 2, backend), list[StepCounters]()
    world.ranks[1].on_step(seen.append)
    given = gradients(2, 0)
    world.step(given)
    norm = np.sqrt(sum(np.sum(np.square(g.astype(np.float64))) for g in given[1].values()))
    owed = world.ranks[1].norm("residuals")
    stats = world.ranks[1].stats()
    world.step(gradients(2, 1))
    assert seen[0].sent_share is None
    assert seen[1].residual_norm_ratio == pytest.approx(owed / norm, 1e-4)
    assert seen[1].sent_share == pytest.approx(stats.sent_share, 1e-3)
    assert world.ranks[1].stats().residual_norm_ratio == seen[1].residual_norm_ratio


def test_memory_is_counted_by_hand() -> None:
    plan = make_plan([TensorSpec("a", (1000,), "float32")], TopK(0.05, min_numel=0))
    world = World(plan, 3, NUMPY)
    world.step([{"a": np.ones(1000, np.float32)}] * 3)
    payload = plan.buckets[0].payload_bytes
    assert world.ranks[0].stats().memory_bytes == 2 * 4000 + 4 * payload
    dense = make_plan([TensorSpec("a", (1000,), "float32")], Dense(exchange="allreduce"))
    assert World(dense, 3, NUMPY).ranks[0].stats().memory_bytes == 4 * 1005


@pytest.mark.parametrize("exchange", ["sharded", "hierarchical"])
def test_memory_is_of_all_buffers(exchange: str) -> None:
    """Not below what the arrays have that this rank holds by itself, and P payloads at most."""
    plan = make_plan(SPECS, TopK(0.05, min_numel=0, exchange=exchange))
    rank = World(plan, 4, NUMPY).ranks[0]
    sent = rank.traffic().payload_bytes
    assert sent < rank.exchange.buffer_bytes(plan) < 10 * sent + 2 * 5240
    assert rank.memory_bytes > rank.exchange.buffer_bytes(plan)


# A probe.


def test_a_probe_compares_each_bucket_in_turn_with_dense() -> None:
    world = World(make_plan(SPECS, TopK(0.05, min_numel=0)), 2, NUMPY)
    for compressor in world.ranks:
        compressor.probe_every(2)
    seen = list[StepCounters]()
    world.ranks[0].on_step(seen.append)
    for step in range(3):
        given = gradients(2, step)
        world.launch(given)
        exchanged = [NUMPY.array(given[0][name], "float32") for name in ("a", "b")]
        for compressor in world.ranks:
            compressor.step.finish({i: [array] for i, array in enumerate(exchanged)})
        world.commit()
        name = "ab"[step // 2]
        mean = (given[0][name] + given[1][name]) / 2
        applied = exchanged[step // 2].reshape(mean.shape)
        if step != 1:
            cosine = np.sum(mean * applied) / np.linalg.norm(mean) / np.linalg.norm(applied)
            error = np.linalg.norm(mean - applied) / np.linalg.norm(mean)
            assert seen[-1].probe_cosine == pytest.approx(cosine, 1e-4)
            assert seen[-1].probe_error == pytest.approx(error, 1e-4)
    names = [m.name for m in world.network.sent[0] if "probe" in m.name]
    assert names == ["job.0.probe.0", "job.0.probe.1"]


@pytest.mark.parametrize(
    ("squares", "cosine", "error"),
    [((4.0, 4.0, 0.0), 1.0, 0.0), ((4.0, 0.0, 4.0), None, 1.0), ((0.0, 1.0, 1.0), None, None)],
)
def test_what_a_probe_says(squares: Any, cosine: float | None, error: float | None) -> None:
    found = compare(*squares)
    assert (found.probe_cosine, found.probe_error) == (cosine, error)


# Writers.


def test_a_dictionary_has_every_number_that_is_known() -> None:
    numbers = as_dictionary(STEP)
    assert numbers["comm/reduction"] == 30.0
    assert numbers["comm/residual_norm_ratio"] == 2.5
    assert set(FIELDS) - set(numbers) == {
        "comm/sent_share",
        "comm/probe_cosine",
        "comm/probe_error",
    }
    assert as_dictionary(replace(STEP, committed=False))["comm/rolled_back"] == 1.0


def test_the_published_names() -> None:
    """Dashboards depend on them."""
    assert {"comm/sent_bytes", "comm/compress_seconds", "comm/exchange_seconds"} <= set(FIELDS)
    writer = prometheus.Prometheus(rank=3)
    value = writer.registry.get_sample_value
    assert value("hvdtopk_fallback_total", {"rank": "3", "reason": "trend"}) == 0.0
    writer(replace(STEP, fell_back="non-finite"))
    names = {family.name for family in writer.registry.collect()}
    assert names == {
        "hvdtopk_sent_bytes",  # counters: with "_total" behind it
        "hvdtopk_dense_bytes",
        "hvdtopk_compress_seconds",
        "hvdtopk_exchange_seconds",
        "hvdtopk_exposed_seconds",
        "hvdtopk_decompress_seconds",
        "hvdtopk_residual_norm_ratio",
        "hvdtopk_sent_share",
        "hvdtopk_probe_cosine",
        "hvdtopk_probe_error",
        "hvdtopk_level",
        "hvdtopk_memory_bytes",
        "hvdtopk_steps",
        "hvdtopk_fallback",
        "hvdtopk_build",
    }
    assert value("hvdtopk_sent_bytes_total", {"rank": "3"}) == 100.0
    assert value("hvdtopk_fallback_total", {"rank": "3", "reason": "non-finite"}) == 1.0
    assert value("hvdtopk_exchange_seconds_sum", {"rank": "3"}) == 0.2
    version = prometheus.__version__
    assert value("hvdtopk_build_info", {"rank": "3", "version": version}) == 1.0


def test_json_lines(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "rank0.jsonl")
    writer(STEP)
    writer(replace(STEP, step=8, fell_back="residual"))
    writer.close()
    first, second = map(json.loads, (tmp_path / "rank0.jsonl").read_text().splitlines())
    assert first == {"step": 7, **as_dictionary(STEP)}
    assert (second["step"], second["fell_back"]) == (8, "residual")


def test_tensorboard(tmp_path: Path) -> None:
    board = pytest.importorskip("horovod_topk.metrics.tensorboard")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = board.TensorBoard(tmp_path, every=2)
    for step in (7, 8):
        writer(replace(STEP, step=step))
    writer.close()
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(as_dictionary(STEP))
    assert [event.step for event in events.Scalars("comm/sent_bytes")] == [8]


def test_tensorboard_refuses_no_step() -> None:
    board = pytest.importorskip("horovod_topk.metrics.tensorboard")
    with pytest.raises(ConfigError, match="every=0 is not a number of steps"):
        board.TensorBoard("unused", every=0)


def test_keras_progress_line_has_one_number_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The history and the loggers have every metric; the logs, which Keras prints, have one."""
    keras = pytest.importorskip("keras")
    callback = pytest.importorskip("horovod_topk.metrics.keras").callback
    heard: list[Any] = []

    class Compression:
        def on_step(self, function: Any) -> None:
            heard.append(function)

    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    made = callback(Compression(), keras, loggers=[logger])
    step = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs=None: heard[0](STEP)
    )
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    data = np.ones((4, 2)), np.ones((4, 1))
    history = model.fit(*data, batch_size=2, epochs=2, callbacks=[step, made], verbose=2).history
    known = as_dictionary(STEP)
    assert history == {"loss": history["loss"], **{name: [v, v] for name, v in known.items()}}
    first = capsys.readouterr().out.splitlines()[1]
    assert sorted(re.findall(r"[\w/]+(?=: )", first)) == ["comm/reduction", "loss"]
    header, *rows = (tmp_path / "log.csv").read_text().splitlines()
    assert {"epoch", "loss", *known} <= set(header.split(","))
    assert len(rows) == 2


def test_every_rank_serves_what_the_alerts_ask_for() -> None:
    rules = Path(__file__).parents[2] / "docs" / "monitoring-alerts.yml"
    asked = {*re.findall(r"hvdtopk_\w+", rules.read_text())}
    assert len(asked) >= 5
    for rank in range(2):
        writer = prometheus.Prometheus(rank, 0, "127.0.0.1")
        writer(STEP)
        with urllib.request.urlopen(f"http://127.0.0.1:{writer.port}", timeout=10) as answer:
            served = answer.read().decode()
        writer.close()
        assert f'hvdtopk_sent_bytes_total{{rank="{rank}"}} 100.0\n' in served
        assert asked <= {*re.findall(r"^hvdtopk_\w+", served, re.M)}
