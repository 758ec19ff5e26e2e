"""Compiles the CPU kernels into the wheel. Without a compiler the wheel is pure Python.

Any C++17 compiler will do; `scripts/dist.py` has one that compiles for older systems and ARM64.
`HOROVOD_TOPK_REQUIRE_NATIVE=1` makes a failure to compile an error.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILE = Path("horovod_topk") / "kernels" / "compile.py"


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    """hatchling calls it for wheels, editable ones included."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into the source tree, from where the wheel, or an editable install, takes it."""
        root = Path(self.root)
        compiling = _load(root / COMPILE)
        try:
            libraries = compiling.compile_libraries()
        except (compiling.CompileError, OSError) as error:
            if os.environ.get("HOROVOD_TOPK_REQUIRE_NATIVE") == "1":
                raise
            for stale in (compiling.LIBRARY, compiling.TENSORFLOW_LIBRARY):
                stale.unlink(missing_ok=True)
            self.app.display_warning(f"horovod_topk is built without its CPU kernels: {error}")
            return
        build_data["artifacts"] += [str(each.relative_to(root)) for each in libraries]
        build_data["pure_python"] = False
        # `make dist` has auditwheel check for manylinux, and name the wheel so.
        build_data["tag"] = f"py3-none-linux_{compiling.target_machine()}"


def _load(path: Path) -> ModuleType:
    """A module by its file: the package itself is not there yet."""
    spec = importlib.util.spec_from_file_location("compile_kernels", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
