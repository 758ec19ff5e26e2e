"""Create `.venv` for developing horovod_topk. Run by `make setup`; needs no root.

It installs PyTorch, TensorFlow, Open MPI and CMake from wheels, builds Horovod once (the wheel is
kept in a cache, see `setup/horovod.py`) and installs this package with its extras. It uses the
standard library only. A second run returns at once; an interrupted one is taken up by the next.

This file looks at the interpreter before it imports anything else, and so keeps to syntax that
every Python 3 can parse. The work itself is in `setup/provision.py`.
"""

import sys

# The one version that the pinned wheels of both frameworks, Open MPI's among them, are tested on.
PYTHON = (3, 11)


def python_problem(found: "tuple[int, ...]", platform: str, ddp: bool = False) -> "str | None":
    """The line to show when this interpreter cannot be used, or None. `found`: (major, minor).

    ddp: only PyTorch is installed, which newer versions can have, too.
    """
    if not platform.startswith("linux"):
        return "Linux is needed: Open MPI's wheels and horovodrun are tested nowhere else"
    if found == PYTHON or (ddp and found > PYTHON):
        return None
    return (
        "Python {}.{} is needed and this is {}.{}; name one: make setup PYTHON=/path/to/python{}.{}"
    ).format(*PYTHON, *found, *PYTHON)


def main() -> int:
    """Set up the environment; the exit status is 0, 1 (with one line on stderr) or 130."""
    ddp = sys.argv[1:] == ["--ddp"]  # for `make demo-ddp`: without Horovod
    problem = python_problem(sys.version_info[:2], sys.platform, ddp)
    if problem:
        sys.exit("setup: " + problem)
    from setup.provision import main as provision

    return provision(ddp=ddp)


if __name__ == "__main__":
    sys.exit(main())
