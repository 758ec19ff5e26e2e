"""Worker processes that train cells: each imports PyTorch once and has one thread."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from horovod_topk.cli.compare.records import FAILED, Record
from horovod_topk.cli.compare.simulated.training import Task, train


def results(tasks: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[Record]:
    """Yield the record of each task, in the order in which they end."""
    folders = sys.path[:]
    context = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
    with ProcessPoolExecutor(jobs, context, _prepare, (folders,)) as pool:
        futures = [pool.submit(_safely, Task(*task)) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # on Ctrl-C or early exit do not wait: a cell may take hours
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _prepare(folders: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:] = folders
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)  # so that the order of sums is the same in every run


def _end_with_parent() -> None:
    """End this worker after its parent has ended in any way."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _safely(task: Task) -> Record:
    """Train a task; return a failed record if it raises."""
    try:
        return train(task)
    except Exception:
        return Record(task.cell, FAILED, traceback.format_exc(limit=-3))
    finally:
        gc.collect()  # a step runner's parts refer to each other: its arrays wait for the collector
