"""Every case has a launch in the fast tier, and one for each number of ranks in the full tier.

Case files are read and not imported: they want ranks.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DISTRIBUTED = Path(__file__).parents[1] / "distributed"


class Case(NamedTuple):
    """One test function of a case file, with its marks."""

    framework: str
    file: str
    name: str
    sizes: tuple[int, ...]
    everywhere: bool
    slow: bool


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DISTRIBUTED))
    return importlib.import_module("launches")


def cases_of(framework: str, folder: Path, stems: set[str]) -> Iterator[Case]:
    """Each test of a case file; twice where marks choose among its parametrisations."""
    files = [path for path in sorted(folder.glob("case_*.py")) if path.stem in stems]
    for path in files:
        tree = ast.parse(path.read_text())
        of_file = [node.value for node in tree.body if assigns_marks(node)]
        for function in tree.body:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                marks = [ast.unparse(mark) for mark in (*function.decorator_list, *of_file)]
                everywhere, slow = ("pytest.mark." + name for name in ("everywhere", "slow"))
                case = Case(
                    framework,
                    path.stem.removeprefix("case_"),
                    function.name,
                    sizes_of(marks),
                    any(mark.startswith(everywhere) for mark in marks),
                    slow in marks,
                )
                if framework in ("ddp", "fsdp") and "pytest.mark.horovod" in marks:
                    continue
                yield case
                if framework != "torch":  # one in four, or in two, of its parametrisations
                    yield case._replace(slow=True)
                if any(mark.startswith("pytest.mark.one_in") for mark in marks):
                    yield case._replace(slow=True)
                if any(mark.startswith(everywhere + "(one_in") for mark in marks):
                    yield case._replace(everywhere=False)


def sizes_of(marks: list[str]) -> tuple[int, ...]:
    """The numbers of ranks that a case is for: two without a mark."""
    given = [mark.removeprefix("pytest.mark.world_size") for mark in marks if "world_size" in mark]
    sizes = ast.literal_eval(given[0]) if given else 2
    return sizes if isinstance(sizes, tuple) else (sizes,)


def assigns_marks(node: ast.stmt) -> bool:
    """Whether it is the `pytestmark` of a file."""
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"


@pytest.fixture
def cases(launches: Any) -> list[Case]:
    def stems(framework: str) -> set[str]:
        jobs = [job for job in launches.JOBS if job.framework == framework]
        if framework == "fsdp":  # the others are DDP's, once more
            return {"case_fsdp"}
        return {f"case_{name}" for job in jobs for name in job.cases}

    found = [(name, folder, stems(name)) for name, folder in launches.FOLDERS.items()]
    return [case for each in found for case in cases_of(*each)]


def test_no_case_file_is_forgotten(launches: Any) -> None:
    named = {
        (launches.FOLDERS[job.framework], f"case_{name}")
        for job in launches.JOBS
        for name in job.cases
    }
    folders = set(launches.FOLDERS.values())
    assert named == {(path.parent, path.stem) for f in folders for path in f.glob("case_*.py")}


@functools.cache
def launched(launches: Any, tier: str) -> list[tuple[Any, str, set[str]]]:
    """Each launch of a tier, the tier of its cases, and the names of its case files."""
    jobs = [job for job in launches.JOBS if tier in job.tiers]
    stems = [{file.stem.removeprefix("case_") for file in job.files(tier)} for job in jobs]
    return [(job, job.part(tier), names) for job, names in zip(jobs, stems, strict=True)]


def jobs_with(launches: Any, case: Case, tier: str) -> list[Any]:
    """The launches in which a case runs."""
    marks = {"sizes": case.sizes, "everywhere": case.everywhere, "slow": case.slow}
    return [
        job
        for job, part, names in launched(launches, tier)
        if job.framework == case.framework
        and case.file in names
        and launches.runs(part, job.controller, job.ranks, **marks)
    ]


def test_cases_for_torchrun_load_no_horovod(launches: Any) -> None:
    files = [launches.FOLDERS["ddp"] / f"case_{name}.py" for name in launches.DDP]
    assert not [file.name for file in files if "\nimport horovod" in file.read_text()]


def only_afterwards(case: Case) -> bool:
    """Whether the fast tier has it under Horovod, and not under torchrun."""
    of_laws = case.framework == "ddp" and (not case.everywhere or min(case.sizes) > 2)
    return of_laws or (case.framework == "fsdp" and not case.everywhere)


def test_every_case_is_launched_in_the_fast_tier(launches: Any, cases: list[Case]) -> None:
    fast = [case for case in cases if not (case.slow or only_afterwards(case))]
    without = [case for case in fast if not jobs_with(launches, case, "fast")]
    assert not without


def test_every_case_is_launched_with_every_number_of_ranks(
    launches: Any, cases: list[Case]
) -> None:
    for case in cases:
        assert {job.ranks for job in jobs_with(launches, case, "all")} == set(case.sizes), case


def test_the_rest_is_what_all_adds_to_fast(launches: Any, cases: list[Case]) -> None:
    def places(case: Case, *tiers: str) -> list[str]:
        found = [job for tier in tiers for job in jobs_with(launches, case, tier)]
        return sorted(str(job.place) for job in found)

    for case in cases:
        assert places(case, "fast", "rest") == places(case, "all"), case


def test_no_launch_is_without_a_case(launches: Any, cases: list[Case]) -> None:
    for tier in ("fast", "rest", "all"):
        used = {id(job) for case in cases for job in jobs_with(launches, case, tier)}
        again = {id(job) for job in launches.JOBS if job.cases is launches.FSDP}  # DDP's cases
        jobs = [job for job, *_ in launched(launches, tier)]
        assert [job for job in jobs if id(job) not in used | again] == []


@pytest.mark.parametrize(
    ("framework", "expected"),
    [("torch", {("gloo", 2), ("mpi", 3), ("gloo", 4)}), ("tensorflow", {("gloo", 2)})],
)
def test_where_laws_run_in_the_fast_tier(
    framework: str, expected: set[tuple[str, int]], launches: Any, cases: list[Case]
) -> None:
    laws = [case for case in cases if case.framework == framework and case.everywhere]
    launched = [job for case in laws for job in jobs_with(launches, case, "fast")]
    assert {(job.controller, job.ranks) for job in launched} == expected
