"""Who may import whom: `import horovod_topk` loads no framework, and rooms keep to themselves.

Two ways of looking: a fresh interpreter says what an import loads, the syntax tree says what a
file asks for. Each is also shown to fail, with one import too many.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import horovod_topk

PACKAGE = Path(horovod_topk.__file__).parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "numpy", "horovod", "mpi4py"}

BELOW_CORE = ".methods .reporting .ops .config .ratios .schedules .guard .errors "


def _core(rooms: str) -> str:
    return " ".join(f".core.{room}" for room in rooms.split())


# The rooms of core on five floors, lowest first -> the rooms on floors below it.
FLOORS = {
    "__init__.py": "",
    "plan": "",
    "state": "plan",
    "codec": "plan state",
    "exchange": "plan state codec",
    "control": "plan state codec",  # on one floor with exchange
    "run": "plan state codec exchange control",
}

# room -> what its files may import beside the standard library and themselves; those of this
# package begin with a dot
ROOMS = {
    "errors.py": "",
    "ratios.py": ".errors",
    "schedules.py": ".errors .ratios",
    "guard.py": ".errors .ratios .schedules",
    "config.py": ".errors .guard .ratios .schedules",
    "__init__.py": ".errors .methods .reporting",
    "reporting.py": ".errors",
    "methods": ".config .errors .ops .ratios .schedules",
    **{f"core/{room}": BELOW_CORE + _core(below) for room, below in FLOORS.items()},
    "ops/__init__.py": ".ops.protocol",
    "ops/protocol.py": ".ops.coding .ops.philox",
    "ops/verbs.py": ".ops.coding .ops.orthonormal .ops.protocol",
    "ops/orthonormal.py": ".ops.protocol",
    "ops/philox.py": "",
    "ops/coding.py": "",
    "ops/torch.py": (
        ".kernels .ops.coding .ops.philox .ops.protocol .ops.torch_lists .ops.torch_packing "
        ".ops.verbs torch"
    ),
    "ops/torch_packing.py": ".ops.coding torch",
    "ops/torch_lists.py": ".kernels .ops.coding .ops.protocol torch",
    "ops/tensorflow.py": (
        ".kernels.native .ops.coding .ops.philox .ops.protocol .ops.tensorflow_packing .ops.verbs "
        "tensorflow"
    ),
    "ops/tensorflow_packing.py": ".ops.coding tensorflow",
    "kernels/__init__.py": "",
    "kernels/native.py": ".kernels.compile",
    "kernels/compile.py": "",
    "kernels/triton": ".ops.coding .ops.philox .ops.protocol torch triton",
    # safetensors and operations by name, for the framework at hand
    "checkpoint": ".core .errors",
    "elastic/leaving.py": ".elastic horovod.common.elastic horovod.common.exceptions",
    "elastic": ".checkpoint .core .errors",
    "metrics": ".__version__ .core.run.stats .errors .reporting",
    "metrics/tensorboard.py": ".core.run.stats .metrics .schedules tensorboard",
    "metrics/prometheus.py": ".__version__ .core.run.stats .guard prometheus_client",
    "process_sets.py": ".core.plan.nodes horovod.common",
    "cost": ".config .core .errors .methods .ops",
    "cli": (
        ".__version__ .config .core .cost .errors .kernels .methods .ops.protocol .ratios "
        ".reporting .schedules .updates.tracker"
    ),
    "cli/canvas.py": "matplotlib",
    # what these ask each framework for, by name
    "cli/doctor/kernels.py": "horovod_topk",
    "cli/frameworks.py": "horovod_topk",
    "cli/bench": (
        ".cli .config .core .cost.quantities .ddp .errors .methods .reporting .torch horovod.torch "
        "matplotlib.axes torch"
    ),
    "cli/horovodrun.py": "horovod.common horovod.runner",
    "cli/process.py": "psutil",
    "cli/compare": (
        ".cli .config .core.run.substitute .cost.quantities .errors .local.call .reporting "
        "matplotlib tqdm"
    ),
    "cli/compare/simulated": (
        ".cli .config .core .local.call .methods .ops.torch .torch_training .updates.tracker torch"
    ),
    "cli/tune": ".cli .config .core .cost .local.call .methods .torch_training .updates.tracker",
    "cli/plan": (
        ".cli .config .core .cost .errors .methods .process_sets .reporting .updates.tracker "
        "matplotlib.axes"
    ),
    "updates": ".core .methods .ops",
    "updates/formulas.py": ".ops.coding",
    "updates/tensorflow.py": ".ops .updates tensorflow",
    "updates/torch.py": ".kernels .ops .updates torch",
    "local": ".config .core .errors .methods .ops .ratios",
    # what PyTorch's adapters have in common
    "torch_training": (
        ".config .core .errors .local .methods .ops.coding .ops.torch .reporting .updates torch"
    ),
    "ddp": (
        ".config .core .errors .guard .local .methods .ops.torch .reporting .torch_training torch"
    ),
    "fsdp": ".config .core .errors .guard .methods .ops.torch .reporting .torch_training torch",
    # what the integrations share, and each of them with its library
    "integrations": ".checkpoint .core .ddp .errors .fsdp .reporting .torch_training torch",
    **{
        f"integrations/{library}.py": f"{library} torch .checkpoint .errors"
        " .integrations.compression .integrations.waiting"
        for library in ("accelerate", "transformers", "lightning")
    },
    "torch": (
        ".config .core .elastic .errors .guard .local .methods .ops.torch .process_sets .reporting "
        ".torch_training horovod.common.exceptions horovod.torch torch"
    ),
    "tensorflow": (
        ".config .core .elastic .errors .guard .local .methods .ops.tensorflow .process_sets "
        ".ratios .reporting .updates horovod._keras horovod.common.elastic "
        "horovod.common.exceptions horovod.tensorflow keras tensorflow"
    ),
}


# What an import loads


def loaded_frameworks(statement: str, package: Path = PACKAGE) -> set[str]:
    """Frameworks in memory after `statement`, in a fresh interpreter."""
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return FRAMEWORKS & set(done.stdout.split())


def test_the_core_loads_no_framework_and_no_numpy() -> None:
    files = (path.relative_to(PACKAGE.parent) for path in (PACKAGE / "core").rglob("*.py"))
    core = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    assert "horovod_topk.core.run.runner" in core
    modules = ["horovod_topk", "horovod_topk.config", "horovod_topk.errors", "horovod_topk.ops"]
    assert loaded_frameworks(f"import {', '.join([*modules, *core])}") == set()


def test_the_command_loads_no_framework() -> None:
    modules = ["bench", "bench.table", "bench.figures", "bench.nic", "bench.picture"]
    names = [f"horovod_topk.cli.{module}" for module in modules]
    assert loaded_frameworks(f"import horovod_topk.cli, {', '.join(names)}") == set()


def test_adapters_of_torch_alone_need_no_horovod() -> None:
    found = loaded_frameworks("import horovod_topk.ddp, horovod_topk.fsdp")
    assert found <= {"torch", "numpy"}


@pytest.mark.parametrize("module", ["core/plan/buckets.py", "errors.py"])
def test_the_test_above_can_fail(tmp_path: Path, module: str) -> None:
    spoilt = tmp_path / "horovod_topk"
    shutil.copytree(PACKAGE, spoilt, ignore=shutil.ignore_patterns("__pycache__"))
    with (spoilt / module).open("a") as file:
        file.write("\nimport numpy\n")
    assert loaded_frameworks("import horovod_topk.core.run.runner", spoilt) == {"numpy"}


# What a file asks for


def asked_for(source: str) -> set[str]:
    """Dotted names of all modules that a file imports, also within functions and by name."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides which room it enters"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = getattr(node.args[0], "value", None)
            found |= {name} if str(name).startswith("horovod_topk") else set()
    return found


def trespasses(name: str, source: str) -> set[str]:
    """Modules that a file imports although the rule for its room does not allow it."""
    rooms = [room for room in ROOMS if name == room or name.startswith(f"{room}/")]
    assert rooms, f"{name} is in no room: say in ROOMS what it may import"
    return {module for module in asked_for(source) if not _may(max(rooms, key=len), module)}


def _may(room: str, name: str) -> bool:
    named = [f"horovod_topk{each}" if each[0] == "." else each for each in ROOMS[room].split()]
    itself = [] if room.endswith(".py") else [f"horovod_topk.{room.replace('/', '.')}"]
    allowed = {*named, *itself, *sys.stdlib_module_names}
    return any(f"{name}.".startswith(f"{module}.") for module in allowed)


def test_every_room_keeps_to_its_own_imports() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = {name: trespasses(name, path.read_text()) for name, path in sources.items()}
    assert {"core/codec/codec.py", "torch/state.py", "ops/torch.py"} <= set(found)
    assert {name: modules for name, modules in found.items() if modules} == {}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core/codec/codec.py", "import torch"),
        ("core/codec/codec.py", "from horovod_topk.torch import state"),
        ("core/codec/codec.py", "def f():\n    import horovod.torch"),
        ("core/plan/buckets.py", "from horovod_topk.core.state import residual"),
        ("core/codec/measures.py", "from horovod_topk.core.control.guard import Watch"),
        ("core/run/step.py", "from horovod_topk.updates import tracker"),
        ("ops/torch.py", "from horovod_topk.core import plan"),
        ("ops/protocol.py", "from horovod_topk.core.plan.buckets import Plan"),
        ("torch/state.py", "import tensorflow"),
        ("torch_training/state.py", "import horovod.torch"),
        ("ddp/state.py", "from horovod_topk.torch import state"),
        ("torch/state.py", "from horovod_topk.ddp import TopKEF"),
        ("ddp/state.py", "from horovod_topk.integrations import compression"),
        ("integrations/compression.py", "import accelerate"),
        ("integrations/transformers.py", "from accelerate import Accelerator"),
        ("tensorflow/__init__.py", "import torch"),
        ("config.py", "from horovod_topk.core import plan"),
    ],
)
def test_a_trespass_is_noticed(module: str, line: str) -> None:
    path = PACKAGE / module
    source = path.read_text() if path.exists() else ""
    assert len(trespasses(module, f"{source}\n{line}\n")) == 1
