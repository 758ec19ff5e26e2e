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

BELOW_CORE = {
    "horovod_topk.methods",
    "horovod_topk.reporting",
    "horovod_topk.ops",
    "horovod_topk.config",
    "horovod_topk.ratios",
    "horovod_topk.schedules",
    "horovod_topk.guard",
    "horovod_topk.errors",
}


def _core(*rooms: str) -> set[str]:
    return {f"horovod_topk.core.{room}" for room in rooms}


# The rooms of core on five floors, lowest first -> the rooms on floors below it.
FLOORS = {
    "__init__.py": set[str](),
    "plan": set[str](),
    "state": _core("plan"),
    "codec": _core("plan", "state"),
    "exchange": _core("plan", "state", "codec"),
    "control": _core("plan", "state", "codec"),  # on one floor with exchange
    "run": _core("plan", "state", "codec", "exchange", "control"),
}

# room -> what its files may import beside the standard library and themselves
ROOMS = {
    "errors.py": set[str](),
    "ratios.py": {"horovod_topk.errors"},
    "schedules.py": {"horovod_topk.ratios", "horovod_topk.errors"},
    "guard.py": {"horovod_topk.schedules", "horovod_topk.errors"},
    "config.py": {
        "horovod_topk.ratios",
        "horovod_topk.schedules",
        "horovod_topk.guard",
        "horovod_topk.errors",
    },
    "__init__.py": {"horovod_topk.errors", "horovod_topk.methods", "horovod_topk.reporting"},
    "reporting.py": {"horovod_topk.errors"},
    "methods": {
        "horovod_topk.ops",
        "horovod_topk.config",
        "horovod_topk.ratios",
        "horovod_topk.schedules",
        "horovod_topk.errors",
    },
    **{f"core/{room}": BELOW_CORE | below for room, below in FLOORS.items()},
    "ops/__init__.py": {"horovod_topk.ops.protocol"},
    "ops/protocol.py": {"horovod_topk.ops.coding", "horovod_topk.ops.philox"},
    "ops/verbs.py": {
        "horovod_topk.ops.coding",
        "horovod_topk.ops.orthonormal",
        "horovod_topk.ops.protocol",
    },
    "ops/orthonormal.py": {"horovod_topk.ops.protocol"},
    "ops/philox.py": set[str](),
    "ops/coding.py": set[str](),
    "ops/numpy.py": {
        "horovod_topk.ops.verbs",
        "numpy",
        "horovod_topk.ops.protocol",
        "horovod_topk.ops.coding",
        "horovod_topk.ops.philox",
    },
    "ops/torch.py": {
        "horovod_topk.ops.verbs",
        "torch",
        "horovod_topk.ops.protocol",
        "horovod_topk.ops.coding",
        "horovod_topk.ops.philox",
        "horovod_topk.ops.torch_lists",
        "horovod_topk.ops.torch_packing",
        "horovod_topk.kernels",
    },
    "ops/torch_packing.py": {"torch", "horovod_topk.ops.coding"},
    "ops/torch_lists.py": {
        "torch",
        "horovod_topk.ops.coding",
        "horovod_topk.ops.protocol",
        "horovod_topk.kernels",
    },
    "ops/tensorflow.py": {
        "horovod_topk.ops.verbs",
        "tensorflow",
        "horovod_topk.ops.protocol",
        "horovod_topk.ops.coding",
        "horovod_topk.ops.philox",
        "horovod_topk.ops.tensorflow_packing",
        "horovod_topk.kernels.native",
    },
    "ops/tensorflow_packing.py": {"tensorflow", "horovod_topk.ops.coding"},
    "kernels/__init__.py": set[str](),
    "kernels/native.py": {"horovod_topk.kernels.compile"},
    "kernels/compile.py": set[str](),
    "kernels/triton": {"torch", "triton", "horovod_topk.ops.coding", "horovod_topk.ops.protocol"},
    # safetensors and operations by name, for the framework at hand
    "checkpoint": {"horovod_topk.core", "horovod_topk.errors"},
    "elastic/leaving.py": {
        "horovod.common.elastic",
        "horovod.common.exceptions",
        "horovod_topk.elastic",
    },
    "elastic": {"horovod_topk.checkpoint", "horovod_topk.core", "horovod_topk.errors"},
    "metrics": {
        "horovod_topk.core.run.stats",
        "horovod_topk.errors",
        "horovod_topk.reporting",
        "horovod_topk.__version__",
    },
    "metrics/tensorboard.py": {
        "tensorboard",
        "horovod_topk.core.run.stats",
        "horovod_topk.metrics",
        "horovod_topk.schedules",
    },
    "metrics/prometheus.py": {
        "prometheus_client",
        "horovod_topk.core.run.stats",
        "horovod_topk.guard",
        "horovod_topk.__version__",
    },
    "mpi.py": {
        "numpy",
        "mpi4py",
        "horovod_topk.core.exchange.protocol",
        "horovod_topk.core.plan.nodes",
    },
    "process_sets.py": {"horovod.common", "horovod_topk.core.plan.nodes"},
    "cost": {
        "horovod_topk.methods",
        "horovod_topk.ops",
        "horovod_topk.core",
        "horovod_topk.config",
        "horovod_topk.errors",
    },
    "cli": {
        "horovod_topk.methods",
        "horovod_topk.reporting",
        "horovod_topk.__version__",
        "horovod_topk.cost",
        "horovod_topk.ops.protocol",
        "horovod_topk.kernels",
        "horovod_topk.core",
        "horovod_topk.updates.tracker",
        "horovod_topk.config",
        "horovod_topk.ratios",
        "horovod_topk.schedules",
        "horovod_topk.errors",
    },
    "cli/canvas.py": {"matplotlib"},
    # what these ask each framework for, by name
    "cli/doctor/kernels.py": {"horovod_topk"},
    "cli/frameworks.py": {"horovod_topk"},
    "cli/bench": {
        "horovod_topk.methods",
        "horovod_topk.reporting",
        "torch",
        "horovod.torch",
        "matplotlib.axes",  # what a hint names
        "horovod_topk.cli",
        "horovod_topk.cost.quantities",
        "horovod_topk.ddp",
        "horovod_topk.torch",
        "horovod_topk.core",
        "horovod_topk.config",
        "horovod_topk.errors",
    },
    "cli/horovodrun.py": {"horovod.common", "horovod.runner"},
    "cli/process.py": {"psutil"},
    "cli/compare": {
        "horovod_topk.cli",
        "horovod_topk.cost.quantities",
        "horovod_topk.core.run.substitute",
        "horovod_topk.local.call",
        "horovod_topk.reporting",
        "horovod_topk.config",
        "horovod_topk.errors",
        "matplotlib",
        "tqdm",
    },
    "cli/compare/simulated": {
        "horovod_topk.cli",
        "horovod_topk.config",
        "horovod_topk.core",
        "horovod_topk.local.call",
        "horovod_topk.methods",
        "horovod_topk.ops.torch",
        "horovod_topk.torch_training",
        "horovod_topk.updates.tracker",
        "torch",
    },
    "cli/tune": {
        "horovod_topk.cli",
        "horovod_topk.config",
        "horovod_topk.core",
        "horovod_topk.cost",
        "horovod_topk.local.call",
        "horovod_topk.methods",
        "horovod_topk.torch_training",
        "horovod_topk.updates.tracker",
    },
    "cli/plan": {
        "horovod_topk.methods",
        "horovod_topk.reporting",
        "matplotlib.axes",
        "horovod_topk.cli",
        "horovod_topk.cost",
        "horovod_topk.updates.tracker",
        "horovod_topk.process_sets",
        "horovod_topk.core",
        "horovod_topk.config",
        "horovod_topk.errors",
    },
    "updates": {
        "horovod_topk.core",
        "horovod_topk.methods",
        "horovod_topk.ops",
    },
    "updates/formulas.py": {"horovod_topk.ops.coding"},
    "updates/tensorflow.py": {"tensorflow", "horovod_topk.ops", "horovod_topk.updates"},
    "updates/torch.py": {
        "torch",
        "horovod_topk.kernels",
        "horovod_topk.ops",
        "horovod_topk.updates",
    },
    "local": {
        "horovod_topk.core",
        "horovod_topk.methods",
        "horovod_topk.ops",
        "horovod_topk.config",
        "horovod_topk.errors",
    },
    # what PyTorch's adapters have in common
    "torch_training": {
        "horovod_topk.local",
        "horovod_topk.reporting",
        "horovod_topk.methods",
        "torch",
        "horovod_topk.core",
        "horovod_topk.ops.coding",
        "horovod_topk.ops.torch",
        "horovod_topk.updates",
        "horovod_topk.config",
        "horovod_topk.errors",
    },
    "ddp": {
        "horovod_topk.local",
        "horovod_topk.methods",
        "horovod_topk.reporting",
        "torch",
        "horovod_topk.torch_training",
        "horovod_topk.core",
        "horovod_topk.ops.torch",
        "horovod_topk.config",
        "horovod_topk.guard",
        "horovod_topk.errors",
    },
    "fsdp": {
        "horovod_topk.methods",
        "horovod_topk.reporting",
        "torch",
        "horovod_topk.torch_training",
        "horovod_topk.core",
        "horovod_topk.ops.torch",
        "horovod_topk.config",
        "horovod_topk.guard",
        "horovod_topk.errors",
    },
    # what the integrations share, and each of them with its library
    "integrations": {
        "horovod_topk.checkpoint",
        "horovod_topk.reporting",
        "torch",
        "horovod_topk.torch_training",
        "horovod_topk.ddp",
        "horovod_topk.fsdp",
        "horovod_topk.core",
        "horovod_topk.errors",
    },
    **{
        f"integrations/{library}.py": {
            library,
            "torch",
            "horovod_topk.checkpoint",
            "horovod_topk.errors",
            "horovod_topk.integrations.compression",
            "horovod_topk.integrations.waiting",
        }
        for library in ("accelerate", "transformers", "lightning")
    },
    "torch": {
        "horovod_topk.local",
        "horovod_topk.methods",
        "horovod_topk.reporting",
        "torch",
        "horovod_topk.torch_training",
        "horovod.torch",
        "horovod.common.exceptions",
        "horovod_topk.elastic",
        "horovod_topk.process_sets",
        "horovod_topk.core",
        "horovod_topk.ops.torch",
        "horovod_topk.config",
        "horovod_topk.guard",
        "horovod_topk.errors",
    },
    "tensorflow": {
        "horovod_topk.local",
        "horovod_topk.methods",
        "horovod_topk.reporting",
        "tensorflow",
        "keras",
        "horovod.tensorflow",
        "horovod._keras",
        "horovod.common.exceptions",
        "horovod.common.elastic",
        "horovod_topk.elastic",
        "horovod_topk.process_sets",
        "horovod_topk.core",
        "horovod_topk.ops.tensorflow",
        "horovod_topk.ratios",
        "horovod_topk.config",
        "horovod_topk.guard",
        "horovod_topk.errors",
        "horovod_topk.updates",
    },
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


@pytest.mark.parametrize("adapter", ["ddp", "fsdp"])
def test_adapters_of_torch_alone_need_no_horovod(adapter: str) -> None:
    assert loaded_frameworks(f"import horovod_topk.{adapter}") <= {"torch", "numpy"}


@pytest.mark.parametrize("module", ["core/plan/buckets.py", "errors.py"])
def test_the_test_above_can_fail(tmp_path: Path, module: str) -> None:
    spoilt = tmp_path / "horovod_topk"
    shutil.copytree(PACKAGE, spoilt, ignore=shutil.ignore_patterns("__pycache__"))
    with (spoilt / module).open("a") as file:
        file.write("\nimport numpy\n")
    assert loaded_frameworks("import horovod_topk.core.run.runner", spoilt) == {"numpy"}


# What a file asks for


def imports(source: str) -> set[str]:
    """Dotted names of all modules a file imports, also within functions."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides which room it enters"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def asked_by_name(source: str) -> set[str]:
    """Modules of this package that a file hands to `import_module`: `imports` misses them."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    named = (each for each in calls if ast.unparse(each.func).endswith("import_module"))
    values = (getattr(each.args[0], "value", None) for each in named)
    return {name for name in values if isinstance(name, str) and name.startswith("horovod_topk")}


def trespasses(name: str, source: str) -> set[str]:
    """Modules that a file imports although the rule for its room does not allow it."""
    rooms = [room for room in ROOMS if name == room or name.startswith(f"{room}/")]
    assert rooms, f"{name} is in no room: say in ROOMS what it may import"
    asked = imports(source) | asked_by_name(source)
    return {module for module in asked if not _may(max(rooms, key=len), module)}


def _may(room: str, name: str) -> bool:
    itself = set[str]() if room.endswith(".py") else {f"horovod_topk.{room.replace('/', '.')}"}
    allowed = ROOMS[room] | itself | sys.stdlib_module_names
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
        ("core/codec/codec.py", "import numpy as np"),
        ("core/codec/codec.py", "from horovod_topk.torch import state"),
        ("core/codec/codec.py", "from horovod_topk import mpi"),
        ("core/codec/codec.py", "def f():\n    import horovod.torch"),
        ("core/plan/buckets.py", "from horovod_topk.core.state import residual"),
        ("core/codec/measures.py", "from horovod_topk.core.control.guard import Watch"),
        ("core/exchange/protocol.py", "def f():\n    from horovod_topk.core.run import step"),
        ("core/run/step.py", "from horovod_topk.updates import tracker"),
        ("ops/torch.py", "import numpy"),
        ("ops/torch.py", "from horovod_topk.core import plan"),
        ("ops/numpy.py", "from horovod_topk.ops.torch import TorchOps"),
        ("ops/protocol.py", "from horovod_topk.core.plan.buckets import Plan"),
        ("torch/state.py", "import tensorflow"),
        ("torch/state.py", "from horovod_topk.tensorflow import TopKEF"),
        ("torch/state.py", "import numpy"),
        ("torch_training/state.py", "import horovod.torch"),
        ("torch_training/state.py", "from horovod_topk.torch import TopKEF"),
        ("ddp/state.py", "import horovod.torch"),
        ("ddp/state.py", "from horovod_topk.torch import state"),
        ("torch/state.py", "from horovod_topk.ddp import TopKEF"),
        ("ddp/state.py", "from horovod_topk.integrations import compression"),
        ("integrations/compression.py", "import accelerate"),
        ("integrations/transformers.py", "from accelerate import Accelerator"),
        ("tensorflow/__init__.py", "import torch"),
        ("tensorflow/__init__.py", "from horovod_topk.torch import TopKEF"),
        ("config.py", "from horovod_topk.core import plan"),
        ("__init__.py", "from horovod_topk.torch import TopKEF"),
    ],
)
def test_a_trespass_is_noticed(module: str, line: str) -> None:
    path = PACKAGE / module
    source = path.read_text() if path.exists() else ""
    assert len(trespasses(module, f"{source}\n{line}\n")) == 1
