"""The steps of `make setup` for a container image: a folder of its own, and no more than it needs.

Everything is pinned where `make setup` pins it, in `provision.py` and `horovod.py`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from setup import horovod, machine
from setup.cuda import TOOLKIT_WHEELS, complete_toolkit, find_gpu
from setup.horovod import Variant
from setup.provision import (
    PINS,
    ROOT,
    TENSORFLOW,
    TF_KERAS,
    TORCH,
    TORCH_CPU_INDEX,
    command_environment,
    create,
    install_frameworks,
    one_line,
    pip_install,
    torch_build,
    verify,
)
from setup.run import Console, Runner, SetupError
from setup.state import Environment

EXTRAS = ("torch", "checkpoint", "examples")
# Taken out when all is installed, with what else nobody compiles against in an image.
BUILD_PACKAGES = ("cmake", "wheel")
HEADERS = ("torch/include", "tensorflow/include")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("layer", choices=("horovod", "package"))
    add("prefix", type=Path, help="the virtual environment")
    add("--tensorflow", action="store_true", help="beside PyTorch")
    add("--cuda", action="store_true", help="GPU operations by NCCL")
    return parser.parse_args(given)


def main() -> int:
    """Make one layer; 0, or 1 and one line on stderr."""
    args = arguments()
    environment = Environment(ROOT, args.prefix)
    log = Path(tempfile.gettempdir(), "setup.log")
    runner = Runner(log, command_environment(environment, os.environ), Console())
    try:
        if args.layer == "horovod":
            add_horovod(environment, runner, args)
        else:
            add_package(environment, runner, args)
    except (SetupError, OSError) as error:
        print(f"setup: {one_line(error)}", file=sys.stderr)
        sys.stderr.writelines(log.read_text(errors="replace").splitlines(keepends=True)[-40:])
        return 1
    log.unlink()
    return 0


def pins(tensorflow: bool, cuda: bool) -> list[str]:
    """Return the pins of the packages that Horovod is compiled against or with.

    A CUDA build of torch is 2.13.0 on the package index. pip would prefer 2.13.0+cpu, a build for
    processors, if another index has that.
    """
    found = [pin for pin in PINS if tensorflow or pin != TENSORFLOW]
    return [pin.replace("==", "===") if cuda and pin == TORCH else pin for pin in found]


def extras(tensorflow: bool, cuda: bool) -> list[str]:
    """Of this package. Triton's kernels are for GPUs; PyTorch for those brings its own Triton."""
    return [*EXTRAS, *["tensorflow"] * tensorflow, *["triton"] * cuda]


def frameworks(tensorflow: bool) -> list[str]:
    """Those that Horovod is built for."""
    return [*["tensorflow"] * tensorflow, "torch"]


def add_horovod(environment: Environment, runner: Runner, args: argparse.Namespace) -> None:
    """The environment, the frameworks and Horovod."""
    machine.check_python_parts()
    machine.check_programs()
    compiler = machine.find_compiler(runner.env)
    create(environment, runner)
    index = "" if args.cuda else TORCH_CPU_INDEX
    wanted = pins(args.tensorflow, args.cuda)
    install_frameworks(environment, runner, wanted, index)
    versions = horovod.installed_versions(environment.python, runner)
    runner.console.note(torch_build(versions))
    with tempfile.TemporaryDirectory() as name:
        folder, gpu = Path(name), None
        if args.cuda:
            if versions["cuda"] == "none":
                raise SetupError(f"torch {versions['torch']} is no CUDA build: no index has one")
            toolkit = install_toolkit(environment, runner, folder / "cuda", versions["cuda"])
            gpu = find_gpu(versions, {"CUDA_HOME": str(toolkit)}, environment.packages())
        variant = Variant(args.tensorflow, gpu)
        inputs = horovod.build_inputs(versions, compiler, runner.env, variant)
        wheel = horovod.provide_wheel(folder, inputs, environment.python, compiler, runner, variant)
        pip_install(environment, runner, str(wheel), *wanted)
    verify(environment, runner, frameworks(args.tensorflow), gpu=args.cuda)


def install_toolkit(environment: Environment, runner: Runner, folder: Path, version: str) -> Path:
    """Install CUDA's compiler and headers from NVIDIA's wheels, and return the toolkit's folder.

    version: CUDA's version, as torch names it; 13.0 or later.
    """
    runner.console.step(f"Installing CUDA {version}'s compiler")
    wheels = [f"{name}=={version}.*" for name in TOOLKIT_WHEELS]
    pip_install(environment, runner, "--no-deps", "--target", str(folder), *wheels)
    return complete_toolkit(folder / "nvidia" / f"cu{version.partition('.')[0]}")


def add_package(environment: Environment, runner: Runner, args: argparse.Namespace) -> None:
    """This package and what the examples need; then what only a build needs goes."""
    wanted = ",".join(extras(args.tensorflow, args.cuda))
    runner.console.step(f"Installing horovod_topk[{wanted}]")
    if args.tensorflow:
        pip_install(environment, runner, "--no-deps", TF_KERAS)
    package = f"{environment.root}[{wanted}]"
    released = f"horovod=={horovod.VERSION}"
    pip_install(environment, runner, package, released, *pins(args.tensorflow, args.cuda))
    remove = [environment.python, "-m", "pip", "uninstall", "--yes", *BUILD_PACKAGES]
    runner.check(remove, "what only a build needs cannot be removed")
    for folder in HEADERS:
        shutil.rmtree(environment.packages() / folder, ignore_errors=True)
    verify(environment, runner, frameworks(args.tensorflow), gpu=args.cuda)
