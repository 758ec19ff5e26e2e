"""An environment with the training libraries, on top of the one that runs the tests."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))  # launcher.py

LIBRARIES = "accelerate==1.15.0", "transformers==5.24.0", "lightning==2.6.6"


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has `LIBRARIES`, and PyTorch from this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    found = folder / "bin/python"
    ask = [found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(ask, check=True, capture_output=True, text=True, timeout=60)
    below = Path(packages.stdout.strip()) / "below.pth"
    below.write_text(sysconfig.get_path("purelib") + "\n")
    pins = folder / "constraints.txt"
    pins.write_text(f"torch=={version('torch')}\n")
    install = [found, "-m", "pip", "install", "--quiet", "--constraint", pins, *LIBRARIES]
    subprocess.run(install, check=True, timeout=600)
    return found
