"""Every launch of case files on real ranks, and which of their cases run in which tier.

`JOBS` is the one list of launches. A line says: these case files, on this controller, with so many
ranks. All cases of a line share one launch, that is one pytest session on every rank.

Two marks of a case decide in which of its file's launches it runs. `world_size` says how many ranks
it is for (2 without the mark). `everywhere` is for laws and exchanges: ranks are equal to the bit,
training equals dense, nothing is lost, a step commits or rolls back, and what an exchange does.

| tier   | cases marked `everywhere`     | other cases                                         |
| ------ | ----------------------------- | --------------------------------------------------- |
| `fast` | in all launches of their file | in one: with the fewest ranks they are for        |
| `rest` | in none                       | in all launches but that one                        |
| `all`  | in all launches of their file | in all launches of their file                       |

Under torchrun, where the code that exchanges is the same, the fast tier has cases marked
`everywhere` alone, on two ranks, and of each test one in four of its parametrisations; the rest has
the others. A case marked `horovod` does not run there.

`everywhere(one_in=4)` is for a test with many parameters: beside the launch that runs all of them,
the fast tier runs one in four. A case marked `slow` is not in the fast tier at all, and of a test
marked `one_in(4)` it has one case in four.

A line with `AFTERWARDS` is not in the fast tier; the rest has all of its cases, or those that no
like line has run. PyTorch's laws thus run in the fast tier on Gloo with 2 ranks and on MPI with 3,
and TensorFlow's, whose collectives are the same, on Gloo with 2 ranks; test_mixed.py has a
TensorFlow rank over MPI. A line with `ONCE` has no case that is left for the rest.

Of a test with parameters and without these marks the fast tier has one case in four, one in six in
TensorFlow, whose graphs take long to build, and one in four under torchrun.

The fast tier has all cases of TensorFlow on Gloo with 2 ranks in one launch (`MERGED`), as each
launch takes 20 seconds of processor time before its first case. The other tiers, in which they
would take ten minutes, have three.

`make test` runs tier `fast`, `make test-all` tier `all`; see tests/conftest.py.
tests/unit/test_launches.py compares the list with the case files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = {
    "torch": HERE / "ranks",
    "tensorflow": HERE / "tensorflow_ranks",
    "ddp": HERE / "ranks",
    "fsdp": HERE / "ranks",
}

EVERY = ("fast", "rest", "all")
AFTERWARDS = ("rest", "all")
ONCE = ("fast", "all")
MERGED = ("fast",)
DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}  # for process sets that are made in a case
# ms; Horovod's threads, which wake up each time, hold up graphs that Python builds meanwhile.
SLOW_CYCLES = {"HOROVOD_CYCLE_TIME": "5"}
TWO_HOSTS = "localhost:2,127.0.0.1:2"  # Gloo takes two names of this machine for two hosts


def named(framework: str, *but: str) -> tuple[str, ...]:
    """The case files of a framework: `name` stands for case_name.py."""
    found = (file.stem.removeprefix("case_") for file in FOLDERS[framework].glob("case_*.py"))
    return tuple(sorted(name for name in found if name not in but))


@dataclass(frozen=True)
class Job:
    """One launch.

    Attributes:
        framework: "torch", "tensorflow", "ddp" or "fsdp": whose ranks.
        controller: Horovod's, "gloo" or "mpi"; "alone" is one process without a launcher;
            "torchrun" is torch.distributed's launcher, with Gloo.
        ranks: how many.
        cases: names of case files.
        tiers: in which it is launched.
        settings: further environment variables of the ranks.
        hosts: as `horovodrun -H` takes them.
    """

    framework: str
    controller: str
    ranks: int
    cases: Sequence[str]
    tiers: Sequence[str] = EVERY
    settings: Mapping[str, str] = field(default_factory=dict)
    hosts: str | None = None

    def part(self, tier: str) -> str:
        """The tier of the cases that run: all in the rest if the fast tier launches none."""
        like = [job for job in JOBS if job.place == self.place and "fast" in job.tiers]
        return tier if any({*self.cases} <= {*job.cases} for job in like) else "all"

    @property
    def place(self) -> tuple[object, ...]:
        """What launches of the same kind of ranks have in common."""
        return self.framework, self.controller, self.ranks, self.settings, self.hosts

    def files(self, tier: str) -> list[Path]:
        """Paths of the case files, without those that are known to have no case for it.

        To import them would take longer than some launches.
        """
        paths = [FOLDERS[self.framework] / f"case_{name}.py" for name in self.cases]
        words = [f"world_size\\([^)]*{self.ranks}"] * (self.ranks > 2)
        laws_alone = self.part(tier) == "fast" and self.controller == "torchrun"
        words += ["mark.everywhere"] * laws_alone
        return [path for path in paths if all(_has(path, word) for word in words)]


@cache
def _has(path: Path, word: str) -> bool:
    return re.search(word, path.read_text()) is not None


def runs(
    tier: str,
    controller: str,
    ranks: int,
    *,
    sizes: Sequence[int],
    everywhere: bool = False,
    slow: bool = False,
) -> bool:
    """Whether a case runs in a launch of its file.

    Args:
        tier: "fast", "rest" or "all".
        controller: of the launch.
        ranks: of the launch.
        sizes: the case's `world_size`.
        everywhere: whether the case is marked so.
        slow: whether the case is marked so.
    """
    if ranks not in sizes:
        return False
    once = controller != "torchrun" and ranks == min(sizes)
    fast = (everywhere or once) and not slow
    return {"all": True, "fast": fast, "rest": not fast}[tier]


TORCH = named("torch", "alone", "nodes", "ddp", "fsdp")
FLAT = named("torch", "alone", "nodes", "ddp", "fsdp", "hierarchical")
# Those that know no adapter, with FSDP2: every rank is a node.
FSDP = (
    *("as_simulated", "checkpoint", "methods", "options"),
    *("ranks_agree", "training_loops", "updates"),
)
# The files that ask nothing of Horovod but its verbs, in ranks/over_torch.py; and DDP's own.
DDP = (
    *(
        "as_simulated",
        "changes_alone",
        "checkpoint",
        "clipping",
        "commit_or_roll_back",
        "conservation",
        "ddp",
        "grad_scaler",
    ),
    *("guard", "hierarchical", "learning_rates", "local_steps", "methods"),
    *(
        "momentum",
        "onebit_lamb",
        "options",
        "own_steps",
        "ranks_agree",
        "several",
        "steps",
        "training_loops",
        "updates",
    ),
)
TENSORFLOW = named("tensorflow", "alone")
# The files of TensorFlow with laws and exchanges.
LAWS = ("tape", "tf_as_simulated", "hierarchical", "groups_ratios", "local_steps", "methods")
# About files and optimizers, which know of no controller.
KERAS = ("keras", "keras3", "tf_auto")
OTHERS = named("tensorflow", "alone", *LAWS, *KERAS)

JOBS = (
    # framework, controller, ranks, case files
    Job("torch", "alone", 1, ("alone",), ONCE),
    Job("torch", "gloo", 2, TORCH),
    Job("torch", "gloo", 3, TORCH, AFTERWARDS, settings=DYNAMIC),
    Job("torch", "gloo", 4, FLAT, AFTERWARDS, settings=DYNAMIC),
    Job("torch", "gloo", 4, ("hierarchical", "nodes"), ONCE, settings=DYNAMIC, hosts=TWO_HOSTS),
    Job("torch", "gloo", 4, ("nodes",), AFTERWARDS, hosts=TWO_HOSTS),
    Job("torch", "mpi", 2, TORCH, AFTERWARDS),
    Job("torch", "mpi", 3, TORCH, settings=DYNAMIC),
    Job("torch", "mpi", 4, TORCH, AFTERWARDS, settings=DYNAMIC),
    Job("ddp", "torchrun", 2, DDP),
    Job("ddp", "torchrun", 3, DDP, AFTERWARDS),
    Job("ddp", "torchrun", 4, DDP, AFTERWARDS),
    Job("fsdp", "torchrun", 4, ("fsdp",)),
    Job("fsdp", "torchrun", 2, FSDP, AFTERWARDS, settings={"TEST_ADAPTER": "fsdp"}),
    Job("tensorflow", "alone", 1, ("alone",)),
    Job("tensorflow", "gloo", 2, TENSORFLOW, MERGED, settings=SLOW_CYCLES),
    Job("tensorflow", "gloo", 2, LAWS, AFTERWARDS, settings=SLOW_CYCLES),
    Job("tensorflow", "gloo", 2, KERAS, AFTERWARDS, settings=SLOW_CYCLES),
    Job("tensorflow", "gloo", 2, OTHERS, AFTERWARDS, settings=SLOW_CYCLES),
    Job("tensorflow", "gloo", 3, LAWS, AFTERWARDS, settings=DYNAMIC),
    Job("tensorflow", "gloo", 4, (*LAWS, "keras", "checkpoint"), AFTERWARDS, settings=DYNAMIC),
    Job("tensorflow", "mpi", 2, LAWS, AFTERWARDS, settings=SLOW_CYCLES),
    Job("tensorflow", "mpi", 3, LAWS, AFTERWARDS, settings=DYNAMIC),
    Job("tensorflow", "mpi", 4, LAWS, AFTERWARDS, settings=DYNAMIC),
    Job("tensorflow", "mpi", 4, ("keras",), AFTERWARDS, settings=DYNAMIC),
)
