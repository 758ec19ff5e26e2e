"""`make bench-network`: time a step against bandwidth, TopKEF beside Horovod and torch DDP.

Hosts are namespaces of this machine (`scripts/cluster`), one rank each; on them runs
`horovod-topk bench`, once for each bandwidth, and at the fastest once for each kind of simulated
backward (`network.runs`). Writes docs/results/network.json, and from it docs/network.md and a
picture.

    sudo make bench-network                                     # all of it: half an hour
    sudo make bench-network ARGS="1gbit --rounds 5"             # these; others' results stay
    make bench-network ARGS="--page"                            # the page alone

The authors' bias: they want TopKEF to win. All ways take turns within each run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

import launch
from cluster import Cluster, ClusterError, Link
from horovod_topk.cli.bench.picture import draw
from network import report
from network.runs import HOSTS, RATES, RUNS, Run

LIMIT_SECONDS = 1800.0  # a run
RESULTS = launch.ROOT / "docs" / "results" / "network.json"
PICTURE = RESULTS.with_suffix(".png")
PAGE = launch.ROOT / "docs" / "network.md"

Results = dict[str, dict[str, Any]]


def measure(run: Run, rounds: int) -> dict[str, Any]:
    """What `horovod-topk bench` found on a cluster.

    Raises:
        ClusterError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder, Cluster(HOSTS, Link.of(run.rate)) as cluster:
        found = Path(folder) / "found.json"
        command = ["horovodrun", "--gloo", sys.executable, "-m", "horovod_topk.cli", "bench"]
        options = ["--rounds", str(rounds), "--json", str(found)]
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(launch.ROOT)}
        cluster.run([*command, *run.arguments, *options], settings, limit_seconds=LIMIT_SECONDS)
        result: dict[str, Any] = json.loads(found.read_text())
        return result


def merged(results: Results, key: str, new: dict[str, Any]) -> Results:
    """With a run in the place of the one it repeats, in the order of RUNS."""
    all_of_them = results | {key: new}
    return {key: all_of_them[key] for key in RUNS if key in all_of_them}


def publish(results: Results) -> str:
    """The page, which is written, and the picture."""
    page = report.page(results)
    draw(PICTURE, [results[rate] for rate in RATES if rate in results])
    PAGE.write_text(page)
    return page


def main() -> int:
    """Measure and write; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", help=f"of {', '.join(RUNS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each way")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if unknown := set(args.runs) - set(RUNS):
        parser.error(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    try:
        for key in (bar := tqdm([] if args.page else args.runs or list(RUNS), unit="run")):
            bar.set_postfix_str(key)
            results = merged(results, key, measure(RUNS[key], args.rounds))
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    except ClusterError as error:
        print(f"bench-network: {error}", file=sys.stderr)
        return 1
    print(publish(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
