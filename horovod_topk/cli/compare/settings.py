"""Settings of a comparison, from the command line or from a TOML file."""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import reprlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from horovod_topk.cli.compare.curves import Metric
from horovod_topk.cli.compare.records import Cell
from horovod_topk.cli.options import MOST_RANKS, outside
from horovod_topk.cli.reading import fits
from horovod_topk.config import reject_unknown
from horovod_topk.cost.quantities import bits_per_second, is_number
from horovod_topk.local.call import LocalCall, parse

LOWER = ("loss", "error", "perplexity", "ppl", "nll", "bits_per_byte", "wer", "mse", "mae", "rmse")
HIGHER = ("accuracy", "acc", "f1", "auc", "bleu", "map", "iou", "top1", "top5")
SEEDS = 5
MOST_SEEDS, LARGEST_SEED = 1000, 2**32 - 1  # the largest that NumPy takes
MOST_JOBS, MOST_SECONDS = 1024, 31_536_000  # a year
BASELINES: dict[str, str] = {"dense float32": "none", "dense fp16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """A comparison. In a TOML file these are the keys.

    Args:
        script: the training script.
        arguments: arguments of the script.
        compressors: by the names in tables, each in Python syntax: "TopKEF(ratio=0.01)".
        baselines: dense baselines: "none" and "fp16" are Horovod's own.
        seeds: number of seeds, from 0 on, or a list of seeds.
        seed_argument: the script's option for its seed, "seed" for --seed; None: the script calls
            `horovod_topk.seed()`.
        options: arguments of the script by name, beside `arguments`.
        grid: lists of values for arguments of the script; each combination is one variant.
        ranks: number of processes.
        hosts: hosts for horovodrun, "host1:1,host2:1"; None: this host.
        network: bandwidth of emulated links, one host for each rank, such as "100mbit"; None: off.
        controller: controller of horovodrun, "gloo" or "mpi"; or "torchrun", for DDP and FSDP2.
        limit_seconds: a run that takes longer is ended.
        metric: the metric, "accuracy" or "score:higher"; None: the only one that is reported.
        target: quality to reach; None: the worse final quality of a seed's dense runs.
        budget: seconds at which quality is compared; None: the end of the faster run of a pair.
        version: version of the script; None: runs are repeated when the script has changed.
        simulated: train on simulated ranks, for quality only.
        jobs: number of processes that train simulated ranks.
        title: title above the tables.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    compressors: Mapping[str, str]
    baselines: Mapping[str, str] = field(default_factory=lambda: BASELINES)
    seeds: tuple[int, ...] = tuple(range(SEEDS))
    seed_argument: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ranks: int = 2
    hosts: str | None = None
    network: str | None = None
    controller: str = "gloo"
    limit_seconds: float = 3600.0
    metric: str | None = None
    target: float | None = None
    budget: float | None = None
    version: str | None = None
    simulated: bool = False
    jobs: int = 1
    title: str = ""

    @property
    def rows(self) -> dict[str, str]:
        """Baselines and compressors, by name."""
        return {**self.baselines, **self.compressors}

    @cached_property
    def where(self) -> tuple[tuple[str, Any], ...]:
        """The settings that all runs have in common."""
        content = self.version or hashlib.sha256(self.script.read_bytes()).hexdigest()[:16]
        return (
            ("script", self.script.name),
            ("version", content),
            ("ranks", self.ranks),
            ("hosts", self.hosts),
            ("network", self.network),
            ("controller", "simulated" if self.simulated else self.controller),
        )

    def variants(self) -> list[tuple[tuple[str, Any], ...]]:
        """Every combination of the grid's values; one empty combination without a grid."""
        axes = [[(name, value) for value in values] for name, values in self.grid.items()]
        return list(itertools.product(*axes))

    def cell(self, variant: tuple[tuple[str, Any], ...], name: str, seed: int) -> Cell:
        """The run of a variant, a compressor and a seed."""
        options = [*self.options.items(), *variant]
        words = [word for key, value in options for word in _words(key, value)]
        if self.seed_argument is not None:
            words += _words(self.seed_argument, seed)
        return Cell(self.rows[name], seed, (*self.arguments, *words), variant, self.where)

    def cells(self) -> Iterator[tuple[str, Cell]]:
        """All runs with their names, in turns: one seed of every compressor, then the next seed."""
        for seed in self.seeds:
            for variant in self.variants():
                for name in self.rows:
                    yield name, self.cell(variant, name, seed)


def _words(key: str, value: object) -> list[str]:
    option = key if key.startswith("-") else f"--{key}"
    if isinstance(value, bool):
        return [option] if value else []
    return [option, str(value)]


def metric_of(asked: str | None, reported: Sequence[str]) -> Metric:
    """The metric to compare."""
    known = ", ".join(reported) or "none"
    if asked is None:
        if len(reported) != 1:
            raise ValueError(f"--metric: the script reports {known}. Name the one that counts")
        asked = reported[0]
    name, _, direction = asked.partition(":")
    if reported and name not in reported:
        raise ValueError(f"--metric {name}: the script reports {known}. Name one of these")
    if direction not in ("", "higher", "lower"):
        raise ValueError(f"--metric {asked}: write {name}:higher or {name}:lower")
    if not direction:
        words = {name.lower(), *name.lower().split("_")}
        direction = "higher" if words & {*HIGHER} else "lower" if words & {*LOWER} else ""
    if not direction:
        raise ValueError(
            f"--metric {name}: is higher or lower better? Write {name}:higher or {name}:lower"
        )
    return Metric(name, direction == "higher")


def named(texts: Sequence[str]) -> dict[str, str]:
    """Parse compressors of the command line: "NAME=TopKEF(...)", or without a name."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, call = text.partition("=")
        if not equals or "(" in name:
            name, call = "", text
        written = str(parse(call))
        if (name or written) in found:
            raise ValueError(f"--compressors: {name or written} is there twice. Name one: NAME=...")
        found[name or written] = written
    return found


def of_file(path: Path) -> list[CompareSettings]:
    """Read a TOML file: its comparison, or one for each of its tables `[[cases]]`.

    A case has the keys of a comparison; missing keys are taken from the top of the file, and its
    `options` and `grid` are added to those there. Its `compressors` may be a list of names, or of
    patterns as of file names, of those at the top. Without a title it has its options as one. Paths
    are relative to the file's folder.

    Raises:
        ConfigError, ValueError: the file cannot be read, or a setting is missing or not valid.
    """
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    cases = found.pop("cases", [{}])
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise ValueError(f"{path}: cases = {reprlib.repr(cases)}: write tables [[cases]]")
    for table, keys in ((found, (*MERGED, "compressors")), *((case, MERGED) for case in cases)):
        no_table = {key: table[key] for key in keys if type(table.get(key, {})) is not dict}
        _check_types(no_table, path)
    return [_of_table({**found, **_completed(case, found, path)}, path) for case in cases]


def _completed(case: Mapping[str, Any], top: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A case with what it shares with the top of its file."""
    whole = {**case, **{key: {**top.get(key, {}), **case.get(key, {})} for key in MERGED}}
    if case:
        whole.setdefault("title", ", ".join(map(str, case.get("options", {}).values())))
    if isinstance(asked := case.get("compressors"), list):
        known = top.get("compressors", {})
        found = {each: fnmatch.filter(known, str(each)) for each in asked}
        if missing := [each for each, names in found.items() if not names]:
            raise ValueError(
                f"{path}: compressors = {missing}: the file has none of that name at its top"
            )
        whole["compressors"] = {name: known[name] for names in found.values() for name in names}
    return whole


def _of_table(found: Mapping[str, Any], path: Path) -> CompareSettings:
    known = {each.name for each in fields(CompareSettings)}
    reject_unknown({*found} - known, known, str(path))
    _check_types(found, path)
    if "script" not in found:
        raise ValueError(f"{path}: script is missing. Write script = 'train.py'")
    read = {
        "script": path.parent / found["script"],
        "arguments": tuple(map(str, found.get("arguments", ()))),
        "compressors": _compressors(found.get("compressors", {}), path),
        "baselines": _compressors(found.get("baselines", BASELINES), path),
        "seeds": seeds_of(found.get("seeds", SEEDS)),
        "grid": {key: tuple(values) for key, values in found.get("grid", {}).items()},
    }
    return CompareSettings(**{**found, **read})


def _check_types(found: Mapping[str, Any], path: Path) -> None:
    """Check the types of settings from a file."""
    for name, value in found.items():
        if not fits(TYPES[name], value):
            raise ValueError(f"{path}: {name} = {reprlib.repr(value)}: give {WANTED[TYPES[name]]}")


MERGED = ("options", "grid")  # tables of a case that those at the top of its file complete
Scalar = str | bool | float
Scalars = tuple[Scalar, ...]
Seeds = Annotated[object, lambda value: fits(int | tuple[int, ...], value) or type(value) is int]
Grid = Annotated[Mapping[str, Scalars], lambda grid: all(grid.values())]
WANTED: Mapping[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Scalars: "a list of texts and numbers",
    Mapping[str, Any]: "a table of compressors",
    Mapping[str, Scalar]: "a table of texts and numbers",
    Grid: "a table of lists with one value or more",
    Seeds: "a number of seeds, or a list of seeds",
}
TYPES: Mapping[str, Any] = {  # of settings in a file
    **dict.fromkeys(("script", "seed_argument", "hosts", "network", "controller"), str),
    **dict.fromkeys(("metric", "version", "title"), str),
    **dict.fromkeys(("ranks", "jobs"), int),
    **dict.fromkeys(("limit_seconds", "target", "budget"), float),
    **dict.fromkeys(("compressors", "baselines"), Mapping[str, Any]),
    "arguments": Scalars,
    "options": Mapping[str, Scalar],
    "grid": Grid,
    "seeds": Seeds,
    "simulated": bool,
}


def seeds_of(given: int | Sequence[int]) -> tuple[int, ...]:
    """Seeds from their number, or the seeds themselves."""
    if isinstance(given, int):
        _check_whole("--seeds", given, -MOST_SEEDS, MOST_SEEDS)
    return tuple(range(given)) if isinstance(given, int) else tuple(given)


def _compressors(table: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Parse compressors by name; each is a text, or a table with `method` and settings."""
    found = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            settings = {key: each for key, each in value.items() if key != "method"}
            call = ", ".join(f"{key}={each!r}" for key, each in settings.items())
            value = f"{value.get('method', 'TopKEF')}({call})"
        if not isinstance(value, str):
            raise ValueError(f"{path}: {name} = {value!r}: write a text such as 'TopKEF()'")
        found[name] = str(parse(value))
    return found


def checked(settings: CompareSettings) -> CompareSettings:
    """The settings with an absolute script path, if they can be run."""
    if not settings.script.is_file():
        raise ValueError(f"{settings.script}: no such script")
    if not settings.compressors and not (settings.baselines and settings.grid):
        raise ValueError("nothing to compare. Give --compressors, such as 'TopKEF(ratio=0.01)'")
    if settings.ranks < 2 and not settings.simulated:
        raise ValueError(f"{settings.ranks} rank exchanges nothing. Give --ranks 2 or more")
    _check_numbers(settings)
    if not settings.seeds or len({*settings.seeds}) < len(settings.seeds):
        raise ValueError(f"seeds {settings.seeds}: give one or more, each once")
    if settings.controller not in ("gloo", "mpi", "torchrun"):
        raise ValueError(f"controller {settings.controller!r}: write gloo, mpi or torchrun")
    if settings.controller == "torchrun" and (settings.hosts or settings.network):
        raise ValueError("torchrun starts ranks of this host: leave --hosts and --network out")
    if settings.simulated and (settings.hosts or settings.network):
        raise ValueError("--simulated ranks have no network. Leave out --hosts and --network")
    if settings.hosts is not None and settings.network is not None:
        raise ValueError("--hosts and --network: emulated hosts have names of their own. Give one")
    for name, call in settings.rows.items():
        if not settings.simulated and isinstance(parse(call), LocalCall):
            raise ValueError(
                f"{name}: {call} is an optimizer, which a script makes itself. Give --simulated, "
                "or an option of the script that makes it"
            )
    clashes = settings.baselines.keys() & settings.compressors.keys()
    if clashes:
        raise ValueError(f"{', '.join(clashes)}: name of a baseline and of a compressor. Rename it")
    return replace(settings, script=settings.script.resolve())


def _check_numbers(settings: CompareSettings) -> None:
    """Check that numbers lie within their limits, for the command line and for files."""
    _check_whole("--ranks", settings.ranks, 1 if settings.simulated else 2, MOST_RANKS)
    _check_whole("--jobs", settings.jobs, 1, MOST_JOBS)
    _check_positive("--limit", settings.limit_seconds)
    _check_positive("--budget", settings.budget)
    if settings.target is not None and not is_number(settings.target):
        raise ValueError(f"--target {settings.target:g}: give a finite number")
    for seed in settings.seeds:
        _check_whole("--seeds", seed, 0, LARGEST_SEED)
    for option in ("hosts", "metric", "seed_argument"):
        if getattr(settings, option) == "":
            raise ValueError(f"--{option.replace('_', '-')} '': name one, or leave it out")
    if settings.network is not None:
        try:
            bits_per_second(settings.network)
        except ValueError as error:
            raise ValueError(f"--network {error}") from error


def _check_whole(option: str, value: int, least: int, most: int) -> None:
    if problem := outside(value, least, most):
        raise ValueError(f"{option} {problem}")


def _check_positive(option: str, value: float | None) -> None:
    if value is not None and not 0 < value <= MOST_SECONDS:
        raise ValueError(f"{option} {value:g}: give a number above 0 and {MOST_SECONDS:,} at most")
