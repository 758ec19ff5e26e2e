"""One of the two ranks that `horovod-topk doctor` starts; ends itself at a time limit."""

from __future__ import annotations

import signal
import statistics
import sys
import time

from horovod_topk.cli.doctor.exchange import MARK
from horovod_topk.cli.frameworks import find

SIZE = 1 << 16  # bytes of each rank
WARM_UP, REPEATS = 3, 9


def main(limit: int) -> int:
    """Exchange; rank 0 prints the result."""
    signal.alarm(limit)  # ends this process even while it waits
    framework = find()
    if framework is None:
        print(f"{MARK} Horovod serves neither PyTorch nor TensorFlow")
        return 1
    hvd = framework.hvd
    hvd.init()
    gather, taken = framework.allgather(SIZE, "topkef.doctor"), []
    for _ in range(WARM_UP + REPEATS):
        began = time.perf_counter()
        gather()
        taken.append(time.perf_counter() - began)
    met = hvd.allgather_object(hvd.rank(), name="topkef.doctor.ranks")
    if met != list(range(hvd.size())):
        print(f"{MARK} gathered {met} of ranks 0 to {hvd.size() - 1}")
        return 1
    if hvd.rank() == 0:
        took = 1e3 * statistics.median(taken[WARM_UP:])
        print(f"{MARK} an allgather of {SIZE >> 10} KiB a rank in {took:.2f} ms")
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60))
