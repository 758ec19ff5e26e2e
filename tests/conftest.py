"""Shared by every test. Also puts this folder on `sys.path`, so tests import from `oracle`.

Tests are in tiers, and `--tier` says which of them run:

| tier    | command           | runs                                                               |
| ------- | ----------------- | ------------------------------------------------------------------ |
| `fast`  | `make test`       | every feature and every law, on fewer inputs: see the marks        |
| `tools` | `make test-tools` | the command, scripts, pages, images, set-up, compiling for GPUs    |
| `usual` | `pytest`          | both of them                                                       |
| `all`   | `make test-all`   | every test but those of the integrations                           |
| `rest`  |                   | what `all` adds to the first two; `.ci/run` runs it after them     |

`--tier=integrations`, of `make test-integrations`, has what no other tier has: tests that install
training libraries (tests/integrations).

A file sets the mark `tools` with `pytestmark`: nothing that trains needs what it tests. Each other
test is in the tier `fast`, unless its marks leave it out. A test marked `slow` is in neither of the
two. Of a test marked `one_in(5)` they have one parametrisation in five; `first` says where it
begins. Of other tests in the folders `SPREAD` they have `MOST` parametrisations, spread over all. A
property test with `@examples(20)` tries a third of 20 examples there.

A launch of real ranks is a test in several tiers, with other cases in each of them: the table is in
tests/distributed/launches.py.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from oracle.examples import PART, load

# PyTorch's optimizers load it, and its LLVM ends a process that has loaded TensorFlow's before.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

SPREAD = ("contract", "kernels", "properties")
MOST = 8  # parametrisations of a test there in the tiers `fast` and `tools`
GOLDEN = (5**0.5 - 1) / 2  # its multiples are spread evenly, and repeat no period of parameters

BEGAN = pytest.StashKey[float]()
OF_TOOLS = r"^pytestmark = .*pytest\.mark\.tools\b"  # the whole file


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=list(PART), default="usual", help="which tests")
    parser.addoption(
        "--begin-within",
        type=float,
        metavar="SECONDS",
        help="skip the tests that have not begun so many seconds after pytest has",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BEGAN] = time.monotonic()
    load(config.getoption("--tier"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the files of tools in the fast tier, without importing them."""
    if config.getoption("--tier") != "fast" or collection_path.suffix != ".py":
        return None
    return re.search(OF_TOOLS, collection_path.read_text(), re.M) is not None or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the tier.

    In the fast tier those marked `long` begin first, one after another, and others run beside them.
    """
    tier, seen = config.getoption("--tier"), Counter[str]()
    count = Counter(function_of(item) for item in items)
    wanted = {"fast", "tools"} if tier == "usual" else {tier}
    chosen, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        name = function_of(item)
        tiers = tiers_of(item, seen[name], count[name])
        (chosen if wanted & {*tiers} else others).append(item)
        seen[name] += 1
    config.hook.pytest_deselected(items=others)
    if "fast" in wanted:
        chosen.sort(key=order_of)
    items[:] = chosen


def function_of(item: pytest.Item) -> str:
    """The name of a test without its parameters."""
    return item.nodeid.split("[")[0]


def order_of(item: pytest.Item) -> float:
    """The argument of the mark `long`; tests without it come last."""
    long = item.get_closest_marker("long")
    return math.inf if long is None else float(long.args[0])


def tiers_of(item: pytest.Item, ordinal: int, count: int) -> tuple[str, ...]:
    """The values of `--tier` under which a test runs.

    Args:
        item: the test.
        ordinal: where it is among the parametrisations of its function.
        count: how many these are.
    """
    if tiers := item.get_closest_marker("tiers"):
        return tiers.args
    part = item.get_closest_marker("one_in")
    if part:
        left_out = ordinal % part.args[0] != part.kwargs.get("first", 0)
    else:
        left_out = item.path.parent.name in SPREAD and ordinal * GOLDEN % 1 * count >= MOST
    if left_out or item.get_closest_marker("slow"):
        return ("rest", "all")
    first = "tools" if item.get_closest_marker("tools") else "fast"
    more_examples = hasattr(getattr(item, "obj", None), "hypothesis")
    return (first, "rest", "all") if more_examples else (first, "all")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would begin too late."""
    limit = item.config.getoption("--begin-within")
    if limit is not None and time.monotonic() - item.config.stash[BEGAN] > limit:
        pytest.skip(f"no time was left for it: {item.path.name}")


@pytest.fixture(scope="session")
def tier(pytestconfig: pytest.Config) -> str:
    """Which tests run: "fast", "rest" or "all"; those of tools are as many as in "fast"."""
    tier = str(pytestconfig.getoption("--tier"))
    return "fast" if tier in ("tools", "usual") else tier


@pytest.fixture(scope="session", autouse=True)
def _orderly_end() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that a launch under way is ended with its ranks."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, previous)
