"""The core under plain `mpirun`, without Horovod: equal to the loopback network, to the bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed.launcher import run
from numpy.typing import NDArray

from oracle import training
from oracle.loopback import Loopback, on_every_rank
from oracle.numpy_ops import NumpyOps

TIME_OUT = 100.0  # seconds; a run takes two


@pytest.mark.one_in(5)
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["allgather", "sharded", "hierarchical"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_mpi_ranks_equal_simulated_ones_to_the_bit(ranks: int, kind: str, tmp_path: Path) -> None:
    over_mpi = _over_mpi(ranks, kind, tmp_path)
    network: Loopback[NDArray[Any]] = Loopback(ranks, NumpyOps())
    futures = on_every_rank(network, lambda collective: training.train(collective, kind))
    simulated = [future.result() for future in futures]
    for rank in range(ranks):
        assert _bytes(over_mpi[rank]) == _bytes(simulated[rank])
        for key in _exchanged(over_mpi[0]):
            assert over_mpi[rank][key].tobytes() == over_mpi[0][key].tobytes()
    assert len(_exchanged(over_mpi[0])) == training.STEPS * len(training.SPECS)
    assert over_mpi[0]["residual.weight"].tobytes() != over_mpi[1]["residual.weight"].tobytes()


def _over_mpi(ranks: int, kind: str, folder: Path) -> list[dict[str, NDArray[Any]]]:
    program = [training.__file__, str(folder), kind]
    launch = run(["mpirun", "-np", str(ranks), sys.executable, *program], folder, TIME_OUT, {})
    assert launch.returncode == 0, launch.describe()
    return [_load(folder / f"{rank}.npz") for rank in range(ranks)]


def _load(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path) as file:
        return dict(file)


def _bytes(arrays: dict[str, NDArray[Any]]) -> dict[str, bytes]:
    return {key: array.tobytes() for key, array in arrays.items()}


def _exchanged(arrays: dict[str, NDArray[Any]]) -> list[str]:
    return [key for key in arrays if not key.startswith("residual.")]
