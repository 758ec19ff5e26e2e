"""`make bench-network`: step times of TopKEF, Horovod and torch DDP at several bandwidths.

Hosts are network namespaces of this machine (`scripts/cluster`) with one rank each. They run
`horovod-topk bench` once for each bandwidth, and at the fastest bandwidth once for each kind of
simulated backward (`network.runs`). Writes docs/results/network.json, docs/network.md and a
picture.

    sudo make bench-network                           # all runs: half an hour
    sudo make bench-network ARGS="1gbit --rounds 5"   # these runs; other results are kept
    make bench-network ARGS="--page"                  # the page alone, from stored results

The authors' bias: they want TopKEF to win. All methods take turns within each run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import launch
from cluster import Cluster, ClusterError, Link
from horovod_topk.cli.bench.picture import draw
from network import report
from network.runs import HOSTS, RATES, RUNS, Run
from runs import Results, Runs

LIMIT_SECONDS = 1800.0  # a run
KEPT = Runs(RUNS, launch.ROOT / "docs" / "results" / "network.json", indent=1)
PICTURE = KEPT.path.with_suffix(".png")
PAGE = launch.ROOT / "docs" / "network.md"


def measure(run: Run, rounds: int) -> dict[str, Any]:
    """Run `horovod-topk bench` on a cluster, and return its results.

    Raises:
        ClusterError: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder, Cluster(HOSTS, Link.of(run.rate)) as cluster:
        found = Path(folder) / "found.json"
        command = ["horovodrun", "--gloo", sys.executable, "-m", "horovod_topk.cli", "bench"]
        options = ["--rounds", str(rounds), "--json", str(found)]
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(launch.ROOT)}
        cluster.run([*command, *run.arguments, *options], settings, limit_seconds=LIMIT_SECONDS)
        result: dict[str, Any] = json.loads(found.read_text())
        return result


def publish(results: Results) -> str:
    """Write the page and the picture; return the page."""
    page = report.page(results)
    draw(PICTURE, [results[rate] for rate in RATES if rate in results])
    PAGE.write_text(page)
    return page


def main() -> int:
    """Measure, and write page and picture; return the exit status."""
    parser = KEPT.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each method")
    args = KEPT.parse(parser)
    try:
        results = KEPT.measure(args, lambda run: measure(run, args.rounds))
    except ClusterError as error:
        print(f"bench-network: {error}", file=sys.stderr)
        return 1
    print(publish(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
