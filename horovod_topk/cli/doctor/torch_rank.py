"""One of the two ranks that `horovod-topk doctor` starts with torchrun, without Horovod."""

from __future__ import annotations

import importlib
import signal
import statistics
import sys
import time

from horovod_topk.cli.doctor.exchange import MARK
from horovod_topk.cli.doctor.rank import REPEATS, SIZE, WARM_UP


def main(limit: int) -> int:
    """Exchange; rank 0 prints the result."""
    signal.alarm(limit)  # ends this process even while it waits
    torch, dist = map(importlib.import_module, ("torch", "torch.distributed"))
    dist.init_process_group("gloo")
    mine, taken = torch.full([SIZE], dist.get_rank(), dtype=torch.uint8), []
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    for _ in range(WARM_UP + REPEATS):
        began = time.perf_counter()
        dist.all_gather(found, mine)
        taken.append(time.perf_counter() - began)
    met = [int(each[0]) for each in found]
    if met != list(range(dist.get_world_size())):
        print(f"{MARK} gathered {met} of ranks 0 to {dist.get_world_size() - 1}")
        return 1
    if dist.get_rank() == 0:
        took = 1e3 * statistics.median(taken[WARM_UP:])
        print(f"{MARK} an allgather of {SIZE >> 10} KiB a rank in {took:.2f} ms")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60))
