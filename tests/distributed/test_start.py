"""The scripts of docs/start.md train on two real ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from launcher import HOROVODRUN, REPOSITORY, TORCHRUN, run

pytestmark = [pytest.mark.distributed, pytest.mark.tools]

LIMIT = 120.0  # seconds; it needs about 10 on two idle cores
PAGE = (REPOSITORY / "docs/start.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^## ([^\n]+)\n(?:(?!## )[^\n]*\n)*?```python\n(.*?)^```$", re.M | re.S)
SCRIPTS = dict(SECTION.findall(PAGE))


def test_every_framework_has_a_script() -> None:
    assert len(SCRIPTS) == 9
    for name, script in SCRIPTS.items():
        compile(script, name, "exec")
        assert "horovod_topk" in script, name


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("name", ["Horovod with PyTorch", "torch DDP"])
def test_a_script_trains_two_ranks(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS[name])
    if name == "Horovod with PyTorch":
        pytest.importorskip("horovod.torch")
        launcher = [*HOROVODRUN, "-np", "2", "--gloo", sys.executable]
    else:
        launcher = [*TORCHRUN, "--nproc-per-node", "2"]
    launch = run([*launcher, str(script)], tmp_path, LIMIT, {})
    assert launch.returncode == 0, launch.describe()
    assert "loss " in launch.output
    assert "100 committed, 0 rolled back" in launch.output


@pytest.mark.timeout(LIMIT + 60)
def test_the_example_with_local_steps_learns(tmp_path: Path) -> None:
    """SGD at a high rate: an outer rate of 2 ended at 88 bits a byte."""
    example = str(REPOSITORY / "examples/ddp_bytelm.py")
    job = [*TORCHRUN, "--nproc-per-node", "2", example, "--local-steps", "30"]
    launch = run(job, tmp_path, LIMIT, {})
    assert launch.returncode == 0, launch.describe()
    (bits,) = re.findall(r"TopKEF: (\d+\.\d+) bits a byte", launch.output)
    assert float(bits) < 4.3
