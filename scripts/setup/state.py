"""What the last set-up left in `.venv`, and locks that keep two set-ups from colliding.

`.venv/setup.json` holds three facts. `identity`: the interpreter and the place the environment was
made for (its scripts carry absolute paths, so a checkout that moved needs a new one). `settled`:
false while pip writes into it, so that an interruption is noticed. `inputs`: a digest of all the
set-up read, written last, so that a second run has nothing to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


class Environment:
    """The virtual environment of one checkout; in `path` where that is not its `.venv`."""

    def __init__(self, root: Path, path: Path | None = None) -> None:
        self.root = root
        self.path = path or root / ".venv"
        self.python = self.path / "bin" / "python"
        self._state = self.path / "setup.json"

    def packages(self) -> Path:
        """Where pip installs, once there is an environment."""
        (folder,) = self.path.glob("lib/python*/site-packages")
        return folder

    def is_current(self) -> bool:
        """Whether the environment is complete and nothing it was made from has changed."""
        return self.is_reusable() and self._load().get("inputs") == self.inputs()

    def is_reusable(self) -> bool:
        """Whether pip can go on in this environment; if not, it has to be made anew."""
        state = self._load()
        made_here = state.get("identity") == self.identity() and state.get("settled") is True
        return made_here and self.python.exists()

    @contextlib.contextmanager
    def being_changed(self) -> Iterator[None]:
        """Around everything that writes into the environment."""
        self._save(settled=False)
        yield
        self._save(settled=True)

    def finish(self) -> None:
        """Record that the environment is complete."""
        self._save(settled=True, inputs=self.inputs())

    def identity(self) -> str:
        """The interpreter and the place this environment belongs to."""
        return f"{sys.version} at {sys.base_prefix} for {self.root}"

    def inputs(self) -> str:
        """A digest of every file the set-up reads from the checkout."""
        scripts, kernels = self.root / "scripts", self.root / "horovod_topk" / "kernels"
        files = [
            self.root / "pyproject.toml",
            scripts / "setup_env.py",
            *sorted((scripts / "setup").glob("*.py")),
            *sorted((scripts / "setup").glob("*.patch")),
            self.root / "hatch_build.py",
            kernels / "compile.py",
            *sorted(file for file in (kernels / "cpu").rglob("*") if file.is_file()),
        ]
        digest = hashlib.sha256()
        for file in files:
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    def _load(self) -> dict[str, object]:
        try:
            state = json.loads(self._state.read_text())
        except (FileNotFoundError, ValueError):  # none yet, or cut short by a full disk
            return {}
        return state if isinstance(state, dict) else {}

    def _save(self, *, settled: bool, inputs: str | None = None) -> None:
        state = {"identity": self.identity(), "settled": settled, "inputs": inputs}
        self._state.write_text(json.dumps(state, indent=1))


@contextlib.contextmanager
def exclusive(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold `lock` during the block; `on_wait` is called first if another process has it.

    The kernel drops the lock with the process, however that ends: no stale lock can remain.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
