"""The fuzz target, for a moment: `make fuzz` runs it for longer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import fuzz
from horovod_topk.kernels import compile as kernels

pytestmark = pytest.mark.tools

SECONDS = 2.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return fuzz.build(tmp_path_factory.mktemp("fuzz"))
    except kernels.CompileError as error:
        pytest.skip(f"no compiler with sanitizers: {error}")


@pytest.mark.slow
@pytest.mark.timeout(300)  # building under sanitizers takes a while on busy cores
@pytest.mark.parametrize("isa", fuzz.ISAS)
def test_nothing_is_found(target: Path, isa: str) -> None:
    fuzz.fuzz(target, isa, SECONDS, seed=len(isa))


@pytest.mark.slow
def test_the_target_can_find_something(target: Path, tmp_path: Path) -> None:
    """With memory that is one byte too short."""
    spoilt = tmp_path / "fuzz_bucket.cpp"
    source = fuzz.TARGET.read_text()
    spoilt.write_text(source.replace("bytes + by), offset(by)", "bytes + by - 1), offset(by)"))
    assert spoilt.read_text() != source
    objects = sorted(str(each) for each in target.parent.glob("*.o"))
    binary = tmp_path / "spoilt"
    include = [f"-I{kernels.SOURCES}", str(spoilt), *objects, "-pthread", "-o", str(binary)]
    kernels.run([*kernels.find_compiler(), "-std=c++17", *fuzz.SANITIZERS, *include])
    with pytest.raises(subprocess.CalledProcessError):
        fuzz.fuzz(binary, "portable", SECONDS, seed=1)
