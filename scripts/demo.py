"""`make demo`: a small CNN on two ranks, with dense gradients and then with TopKEF.

It prints a table and draws the training loss against steps, bytes and time. Loopback between ranks
of one machine is no network, so that there is nothing to save: `scripts/paced.py` makes each rank
wait for its bytes as on a link of `RATE`, and the table has the time of a step without and with it.

    python scripts/demo.py [--ddp]

`--ddp` (`make demo-ddp`) trains with torch DistributedDataParallel, and needs no Horovod. There the
time on a link is the measured one plus that of the bytes.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_topk.cli.bench.table import aligned
from horovod_topk.cli.canvas import panels
from horovod_topk.cli.process import follow, unprefixed
from horovod_topk.cost.quantities import bits_per_second, rate

ROOT = Path(__file__).resolve().parents[1]
PACED, RATE = "scripts/paced.py", "1gbit"
RUNS = {"dense": ["--compression", "none"], "TopKEF": ["--compression", "topk"]}
RESULTS = ROOT / "build" / "demo"
PICTURE = ROOT / "build" / "demo.png"
LIMIT_SECONDS = 300.0  # a run that hangs; ten times as long as it takes on two idle cores

LINK = rate(bits_per_second(RATE))
COLUMNS = (
    "",
    "held-out accuracy",
    "bytes a rank sends",
    "reduction",
    "ms a step, loopback",
    f"ms a step, {LINK}",
)


@dataclass(frozen=True)
class Launch:
    """How ranks exchange gradients: with Horovod, or with torch DDP."""

    launcher: tuple[str, ...]  # the first word is a program of this environment
    script: tuple[str, ...]
    paced: bool  # ranks wait for their bytes; False: the table adds the time of the bytes
    last: str  # what the table says of its last column


HOROVOD = Launch(
    ("horovodrun", "-np", "2", "--gloo", "python"),
    (PACED, RATE, "examples/pytorch_digits.py"),
    paced=True,
    last="each rank also waits for its bytes as on a link of {} (paced, not measured)",
)
DDP = Launch(
    ("torchrun", "--standalone", "--nproc-per-node", "2"),
    ("examples/ddp_digits.py",),
    paced=False,
    last="the time of its bytes is added as on a link of {} (computed, not measured)",
)
NOTE = (
    "Two ranks of this machine. Loopback is no network and has no bandwidth to save; in the last\n"
    "column {}."
)


class RunFailedError(Exception):
    """A run ended badly; the message has the command, why, and the end of its output."""


def train(name: str, arguments: list[str], launch: Launch = HOROVOD) -> dict[str, Any]:
    """Run the example on two ranks, which print; return what it wrote about itself."""
    path = RESULTS / f"{name.lower()}.json"
    path.unlink(missing_ok=True)
    command = [*launch.launcher, *launch.script, *arguments]
    shown = " ".join(command)
    print(f"\n$ {shown}", flush=True)
    own = {name: str(Path(sys.executable).with_name(name)) for name in (command[0], "python")}
    ended = follow(
        [*(own.get(word, word) for word in command), "--json", str(path)],
        limit_seconds=LIMIT_SECONDS,
        on_line=lambda line: print(unprefixed(line), end="", flush=True),
        folder=ROOT,
        environment={"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    if why := ended.problem(LIMIT_SECONDS):
        raise RunFailedError(f"{shown}: {why}\n{ended.tail}")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def row(name: str, run: dict[str, Any], launch: Launch = HOROVOD) -> tuple[str, ...]:
    """A run's line of the table."""
    waited = 8 * run["sent_bytes"] / bits_per_second(RATE)
    paced = seconds_per_step(run, launch)
    return (
        name,
        f"{100 * run['history']['accuracy'][-1]:.1f}%",
        f"{run['sent_bytes']:,}",
        f"{run['dense_bytes'] / run['sent_bytes']:.1f}x",
        f"{1e3 * (paced - waited):.1f}",
        f"{1e3 * paced:.1f}",
    )


def seconds_per_step(run: dict[str, Any], launch: Launch) -> float:
    """Seconds of a step on a link of `RATE`."""
    seconds: float = run["seconds_per_step"]
    return seconds if launch.paced else seconds + 8 * run["sent_bytes"] / bits_per_second(RATE)


def draw(runs: dict[str, dict[str, Any]], launch: Launch = HOROVOD) -> None:
    """Write a picture of the training loss against steps, bytes and seconds."""
    units = {
        "steps": lambda run: 1,
        "bytes sent by a rank (logarithmic)": lambda run: run["sent_bytes"],
        "seconds, without evaluations": lambda run: seconds_per_step(run, launch),
    }
    with panels(PICTURE, 1, 3, (15, 4), dpi=120) as ((first, second, third),):
        for axes, (label, unit) in zip((first, second, third), units.items(), strict=True):
            for name, run in runs.items():
                places = [step * unit(run) for step in run["history"]["step"]]
                axes.plot(places, run["history"]["loss"], alpha=0.8, label=name)
            axes.set_xlabel(label)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        first.set(ylabel="training loss", yscale="log")
        second.set_xscale("log")
        second.legend(frameon=False)
        title = f"Digits, two ranks of one machine; each step as on a link of {LINK}"
        first.figure.suptitle(title)


def main() -> int:
    """Runs both, then shows the table; the exit status is 0, 1 (a run failed) or 130."""
    launch = DDP if sys.argv[1:] == ["--ddp"] else HOROVOD
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    try:
        runs = {name: train(name, arguments, launch) for name, arguments in RUNS.items()}
    except RunFailedError as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    draw(runs, launch)
    rows = [COLUMNS, *(row(name, run, launch) for name, run in runs.items())]
    print("", *aligned(rows), sep="\n")
    print("\n" + NOTE.format(launch.last.format(LINK)))
    print(f"Loss against steps, bytes and seconds: {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
