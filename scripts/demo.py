"""`make demo`: a small CNN on two ranks, with dense gradients and then with TopKEF.

It prints a table and draws the training loss against steps, bytes and time. Loopback between ranks
of one machine is no network, so that there is nothing to save: `scripts/paced.py` makes each rank
wait for its bytes as on a link of `RATE`, and the table has the time of a step without and with it.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import curves
import launch
from horovod_topk.cost.quantities import bits_per_second, rate

EXAMPLE = "examples/pytorch_digits.py"
PACED, RATE = "scripts/paced.py", "1gbit"
RUNS = {"dense": ["--compression", "none"], "TopKEF": ["--compression", "topk"]}
RESULTS = launch.ROOT / "build" / "demo"
PICTURE = launch.ROOT / "build" / "demo.png"
LIMIT_SECONDS = 85.0  # a run; both together have three minutes

LINK = rate(bits_per_second(RATE))
COLUMNS = (
    "",
    "held-out accuracy",
    "bytes a step and rank",
    "reduction",
    "ms a step, loopback",
    f"ms a step, {LINK}",
)
NOTE = (
    "Two ranks of this machine. Loopback is no network and has no bandwidth to save; in the last\n"
    f"column each rank also waits for its bytes as on a link of {LINK} (paced, not measured)."
)


def train(name: str, arguments: list[str]) -> dict[str, Any]:
    """Runs the example on two ranks; returns what it wrote about itself."""
    arguments = [RATE, EXAMPLE, *arguments]
    print(f"\n$ {launch.command_line(PACED, arguments, ranks=2)}", flush=True)
    path = RESULTS / f"{name.replace(' ', '-').lower()}.json"
    path.unlink(missing_ok=True)
    launch.run(PACED, [*arguments, "--json", str(path)], limit_seconds=LIMIT_SECONDS, echo=True)
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def row(name: str, run: dict[str, Any]) -> tuple[str, ...]:
    """A run's line of the table."""
    paced = run["seconds_per_step"]
    waited = 8 * run["sent_bytes"] / bits_per_second(RATE)
    return (
        name,
        f"{100 * run['history']['accuracy'][-1]:.1f}%",
        f"{run['sent_bytes']:,}",
        f"{run['dense_bytes'] / run['sent_bytes']:.1f}x",
        f"{1e3 * (paced - waited):.1f}",
        f"{1e3 * paced:.1f}",
    )


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows as text, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def main() -> int:
    """Runs both, then shows the table; the exit status is 0, 1 (a run failed) or 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    try:
        runs = {name: train(name, arguments) for name, arguments in RUNS.items()}
    except launch.RunFailedError as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    curves.draw(
        PICTURE,
        f"Handwritten digits, two ranks of one machine; each step paced as on a link of {LINK}",
        {name: [run] for name, run in runs.items()},
        log=True,
        timed=True,
    )
    print("\n" + table([COLUMNS, *(row(name, run) for name, run in runs.items())]))
    print(f"\n{NOTE}\nLoss against steps, bytes and seconds: {PICTURE.relative_to(launch.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
