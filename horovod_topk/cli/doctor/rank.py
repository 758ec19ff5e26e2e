"""One of the two ranks that `horovod-topk doctor` starts; ends itself at a time limit.

horovodrun starts it, or, where Horovod is not installed, torchrun.
"""

from __future__ import annotations

import importlib
import signal
import statistics
import sys
from collections.abc import Callable
from typing import Any

from horovod_topk.cli.doctor.exchange import MARK
from horovod_topk.cli.frameworks import find
from horovod_topk.cli.launcher import by_torchrun
from horovod_topk.cli.timing import clocked, repeated

SIZE = 1 << 16  # bytes of each rank
WARM_UP, REPEATS = 3, 9


def main(limit: int) -> int:
    """Exchange; rank 0 prints the result."""
    signal.alarm(limit)  # ends this process even while it waits
    return _torch() if by_torchrun() else _horovod()


def _horovod() -> int:
    framework = find()
    if framework is None:
        print(f"{MARK} Horovod serves neither PyTorch nor TensorFlow")
        return 1
    hvd = framework.hvd
    hvd.init()
    gather = framework.allgather(SIZE, "topkef.doctor")

    def met() -> list[int]:
        found: list[int] = hvd.allgather_object(hvd.rank(), name="topkef.doctor.ranks")
        return found

    status = _report(gather, met, hvd.rank(), hvd.size())
    hvd.shutdown()
    return status


def _torch() -> int:
    torch, dist = map(importlib.import_module, ("torch", "torch.distributed"))
    dist.init_process_group("gloo")
    mine = torch.full([SIZE], dist.get_rank(), dtype=torch.uint8)
    found: list[Any] = [torch.empty_like(mine) for _ in range(dist.get_world_size())]

    def met() -> list[int]:
        return [int(each[0]) for each in found]

    gather = lambda: dist.all_gather(found, mine)  # noqa: E731
    status = _report(gather, met, dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
    return status


def _report(
    gather: Callable[[], object], met: Callable[[], list[int]], rank: int, size: int
) -> int:
    """Time allgathers, and print what they took, or which ranks did not meet."""
    took = statistics.median(repeated(clocked(gather), REPEATS, WARM_UP))
    ranks = met()
    if ranks != list(range(size)):
        print(f"{MARK} gathered {ranks} of ranks 0 to {size - 1}")
        return 1
    if rank == 0:
        print(f"{MARK} an allgather of {SIZE >> 10} KiB a rank in {1e3 * took:.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60))
