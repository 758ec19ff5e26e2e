"""One of the two ranks that `horovod-topk doctor` starts; ends itself at a time limit.

horovodrun starts it, or, where Horovod is not installed, torchrun.
"""

from __future__ import annotations

import signal
import statistics
import sys

from horovod_topk.cli.doctor.exchange import MARK
from horovod_topk.cli.frameworks import find
from horovod_topk.cli.timing import clocked, repeated

SIZE = 1 << 16  # bytes of each rank
WARM_UP, REPEATS = 3, 9


def main(limit: int) -> int:
    """Time allgathers; rank 0 prints what they took, or each rank which ranks did not meet."""
    signal.alarm(limit)  # ends this process even while it waits
    framework = find()
    if framework is None:
        print(f"{MARK} Horovod serves neither PyTorch nor TensorFlow")
        return 1
    framework.begin()
    gather = framework.allgather(SIZE, "topkef.doctor")
    took = statistics.median(repeated(clocked(gather), REPEATS, WARM_UP))
    size, ranks = framework.size, framework.gather(framework.rank, "topkef.doctor.ranks")
    if framework.rank == 0:
        print(f"{MARK} an allgather of {SIZE >> 10} KiB a rank in {1e3 * took:.2f} ms")
    framework.end()
    if ranks == list(range(size)):
        return 0
    print(f"{MARK} gathered {ranks} of ranks 0 to {size - 1}")
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60))
