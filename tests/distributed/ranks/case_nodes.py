"""Two hosts of two ranks, as the launcher has them: nothing about them is made up."""

from __future__ import annotations

import gc
import os
from http.client import HTTPConnection

import horovod.torch as hvd
import pytest
import torch

import training
from horovod_topk.errors import ConfigError
from horovod_topk.torch import TernGrad
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_ranks_equal, bits

SETTINGS = {"ratio": 0.1, "min_numel": 0, "exchange": "hierarchical"}
dynamic = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"


@pytest.mark.world_size(4)
@pytest.mark.skipif(not dynamic, reason="needs process sets")
def test_hosts_are_nodes() -> None:
    task, optimizer = Setup().start(TopKEF(**SETTINGS))
    training.train(task, optimizer, range(4))
    assert_ranks_equal(task.parameters())
    stats = TopKEF.of(optimizer).stats()
    assert (hvd.local_size(), stats.nodes, stats.because) == (2, (2, 2), "")
    assert stats.between_bytes is not None
    assert 0 < 10 * stats.between_bytes < stats.dense_bytes


@pytest.mark.world_size(4)
@pytest.mark.skipif(not dynamic, reason="needs process sets")
def test_nodes_announce_to_each_other() -> None:
    """With a rank that has a NaN, and one more step."""
    task = Setup().task()
    compressor = TernGrad(min_numel=0, exchange="hierarchical")
    optimizer = Setup().distributed(task, compressor)
    training.train(task, optimizer, range(4))
    optimizer.zero_grad()
    (task.loss(hvd.rank(), 9) * (float("nan") if hvd.rank() == 3 else 1.0)).backward()
    optimizer.synchronize()
    assert all(p.grad.isnan().all() for p in task.parameters())
    training.ordinary(task, optimizer, 4)
    assert_ranks_equal(task.parameters())
    assert (compressor.stats().steps, compressor.stats().rolled_back) == (5, 1)


@pytest.mark.world_size(4)
@pytest.mark.skipif(dynamic, reason="shows what happens without process sets")
def test_without_process_sets_the_cure_is_named() -> None:
    """On every rank, before anything has changed; the job goes on."""
    task = Setup().task()
    before = bits(task.parameters()).clone()
    message = r"among ranks such as \[0, 1\].*rank 0 cannot.*init\(process_sets='dynamic'\)"
    with pytest.raises(ConfigError, match=message):
        Setup().distributed(task, TopKEF(**SETTINGS))
    assert torch.equal(bits(task.parameters()), before)
    optimizer = Setup().distributed(task, TopKEF(**{**SETTINGS, "exchange": "sharded"}))
    training.ordinary(task, optimizer, 0)
    assert_ranks_equal(task.parameters())


@pytest.mark.world_size(4)
@pytest.mark.skipif(not dynamic, reason="needs process sets")
def test_process_sets_are_made_anew_after_a_shutdown() -> None:
    """Horovod forgets them; the last case of this launch."""
    gc.collect()  # the optimizers of the cases before
    if hvd.rank() == 0:
        forget_addresses()
    hvd.barrier()
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    task, optimizer = Setup().start(TopKEF(**SETTINGS))
    training.ordinary(task, optimizer, 0)
    assert_ranks_equal(task.parameters())
    assert TopKEF.of(optimizer).stats().nodes == (2, 2)


def forget_addresses() -> None:
    """Have the launcher forget where ranks listen: the next `hvd.init` would connect to that.

    It forgets the addresses of a scope once each of its ranks has said that it is connected; but
    then also what ranks said of every other scope (`finished_list.clear()` in Horovod's
    runner/http/http_server.py), so that a scope which ends between is never forgotten.
    """
    for scope in ("global", "local_localhost", "local_127.0.0.1", "cross_0", "cross_1"):
        mark = f"/{scope}/mark"
        assert _ask("PUT", mark) == 200
        while _ask("GET", mark) == 200:
            _ask("DELETE", mark)


def _ask(method: str, path: str) -> int:
    """The launcher's answer to a request."""
    host, port = (os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{part}"] for part in ("ADDR", "PORT"))
    connection = HTTPConnection(host, int(port), timeout=10)
    try:
        connection.request(method, path, body=b"")
        return connection.getresponse().status
    finally:
        connection.close()
