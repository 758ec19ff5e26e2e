"""That a cluster which left something would be found out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from remains import traces

pytestmark = [pytest.mark.cluster, pytest.mark.tools]


@pytest.mark.parametrize("name", ["/dev/shm/vader_segment.host1.0", "/run/host1.sshd.log"])
def test_a_file(name: str) -> None:
    before = traces()
    Path(name).touch(exist_ok=False)
    try:
        assert traces() - before == {name}
    finally:
        Path(name).unlink()


def test_a_link() -> None:
    before = traces()
    subprocess.run(["ip", "link", "add", "lefttest", "type", "bridge"], check=True)
    try:
        assert traces() - before == {"lefttest"}
    finally:
        subprocess.run(["ip", "link", "delete", "lefttest"], check=True)
