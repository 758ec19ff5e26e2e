"""Trains two ranks under a real Prometheus server and draws what the server has recorded.

    python scripts/monitor.py [--out docs/results/monitoring.png]

It needs the program `prometheus` (Debian: `apt-get install prometheus`) and Matplotlib. The ranks
train a perceptron of 1.3 million parameters with TopKEF and `schedule=Accordion(...)`; between
steps they sleep for 20 ms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PORT = 9400  # of rank 0's endpoint
SERVER = "127.0.0.1:9390"
PANELS = {
    "times fewer bytes than dense": (
        "rate(hvdtopk_dense_bytes_total[4s]) / rate(hvdtopk_sent_bytes_total[4s])"
    ),
    "ms a step, waiting in collectives": (
        "1000 * rate(hvdtopk_exposed_seconds_sum[4s]) / rate(hvdtopk_exposed_seconds_count[4s])"
    ),
    "residual norm / gradient norm": "hvdtopk_residual_norm_ratio",
    "ratio of the step": "hvdtopk_level",
}


def train() -> None:
    """One rank."""
    import horovod.torch as hvd
    import torch

    from horovod_topk.metrics.prometheus import Prometheus
    from horovod_topk.schedules import Accordion
    from horovod_topk.torch import TopKEF

    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    widths = (256, 1024, 1024, 10)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    teacher = torch.randn(256, 10)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=TopKEF(0.01, warmup=None, schedule=Accordion(critical=0.05, window=60)),
    )
    TopKEF.of(optimizer).on_step(Prometheus(hvd.rank(), PORT + hvd.local_rank(), "127.0.0.1"))
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(800):
        inputs = torch.randn(64, 256, generator=generator)
        labels = (inputs @ teacher).argmax(1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        time.sleep(0.02)


def record() -> dict[str, Any]:
    """Start server and ranks; return what the server has of each panel."""
    program = shutil.which("prometheus")
    if program is None:
        sys.exit("There is no prometheus; install it, on Debian by apt-get install prometheus")
    targets = [f"127.0.0.1:{PORT + rank}" for rank in range(2)]
    jobs = [{"job_name": "training", "static_configs": [{"targets": targets}]}]
    rules = [str(HERE.parent / "docs" / "monitoring-alerts.yml")]
    settings = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(json.dumps(settings | {"scrape_configs": jobs, "rule_files": rules}))
        arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        address = f"--web.listen-address={SERVER}"
        server = subprocess.Popen([program, *arguments, address], **quiet)
        try:
            began = time.time()
            ranks = [sys.executable, __file__, "--train"]
            subprocess.run(["horovodrun", "-np", "2", "--gloo", *ranks], check=True)
            return {title: query(text, began, time.time()) for title, text in PANELS.items()}
        finally:
            server.terminate()
            server.wait(10)


def query(text: str, began: float, ended: float) -> Any:
    """One query over the whole run."""
    asked = urllib.parse.urlencode({"query": text, "start": began, "end": ended, "step": 1})
    with urllib.request.urlopen(f"http://{SERVER}/api/v1/query_range?{asked}") as answer:
        return json.load(answer)["data"]["result"]


def draw(found: dict[str, Any], out: Path) -> None:
    """One panel above the other, a line for each rank."""
    from horovod_topk.cli.canvas import panels

    first = min(line["values"][0][0] for lines in found.values() for line in lines)
    with panels(out, len(found), 1, (8, 9), dpi=120, scale="none") as rows:
        for (axes,), (title, lines) in zip(rows, found.items(), strict=True):
            for line, style in zip(lines, ("-", "--"), strict=False):
                points = [(at - first, float(number)) for at, number in line["values"]]
                axes.plot(*zip(*points, strict=True), style, label=f"rank {line['metric']['rank']}")
            axes.set_title(title, fontsize=10)
            axes.set_ylim(bottom=0)
        rows[0][0].legend()
        rows[-1][0].set_xlabel("seconds")


def main() -> None:
    """Record and draw; with --train, be one of the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs/results/monitoring.png")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train()
    else:
        found = record()
        draw(found, args.out)
        for title, lines in found.items():
            ends = [(line["metric"]["rank"], line["values"][-1][1]) for line in lines]
            print(title, len(lines[0]["values"]) if lines else 0, ends)


if __name__ == "__main__":
    main()
