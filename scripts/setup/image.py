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
from setup.horovod import Variant
from setup.provision import (
    PINS,
    ROOT,
    TENSORFLOW,
    TF_KERAS,
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

EXTRAS = ("torch", "mpi", "checkpoint", "examples")
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
    add("--cuda", action="store_true", help="by NCCL; needs CUDA's compiler and NCCL's headers")
    add("--torch-index", default=TORCH_CPU_INDEX, help="where torch is (default: %(default)s)")
    return parser.parse_args(given)


def main() -> int:
    """Make one layer; 0, or 1 and one line on stderr."""
    args = arguments()
    variant = Variant(tensorflow=args.tensorflow, cuda=args.cuda)
    environment = Environment(ROOT, args.prefix)
    log = Path(tempfile.gettempdir(), "setup.log")
    runner = Runner(log, command_environment(environment, os.environ), Console())
    try:
        if args.layer == "horovod":
            add_horovod(environment, runner, variant, args.torch_index)
        else:
            add_package(environment, runner, variant)
    except (SetupError, OSError) as error:
        print(f"setup: {one_line(error)}", file=sys.stderr)
        sys.stderr.writelines(log.read_text(errors="replace").splitlines(keepends=True)[-40:])
        return 1
    log.unlink()
    return 0


def pins(variant: Variant) -> list[str]:
    """Of what Horovod is compiled against or with."""
    return [pin for pin in PINS if variant.tensorflow or pin != TENSORFLOW]


def extras(variant: Variant) -> list[str]:
    """Of this package. Triton's kernels are for GPUs; PyTorch for those brings its own Triton."""
    return [*EXTRAS, *["tensorflow"] * variant.tensorflow, *["triton"] * variant.cuda]


def frameworks(variant: Variant) -> list[str]:
    """Those that Horovod is built for."""
    return [*["tensorflow"] * variant.tensorflow, "torch"]


def add_horovod(
    environment: Environment, runner: Runner, variant: Variant, torch_index: str
) -> None:
    """The environment, the frameworks and Horovod."""
    machine.check_python_parts()
    machine.check_make()
    compiler = machine.find_compiler(runner.env)
    create(environment, runner)
    install_frameworks(environment, runner, pins(variant), torch_index)
    versions = horovod.installed_versions(environment.python, runner)
    runner.console.note(torch_build(versions))
    if variant.cuda and versions["cuda"] == "none":
        raise SetupError(f"torch {versions['torch']} is no CUDA build: give its --torch-index")
    inputs = horovod.build_inputs(versions, compiler, runner.env, variant)
    with tempfile.TemporaryDirectory() as cache:
        wheel = horovod.provide_wheel(
            Path(cache), inputs, environment.python, compiler, runner, variant
        )
        pip_install(environment, runner, str(wheel), *pins(variant))
    verify(environment, runner, frameworks(variant))


def add_package(environment: Environment, runner: Runner, variant: Variant) -> None:
    """This package and what the examples need; then what only a build needs goes."""
    wanted = ",".join(extras(variant))
    runner.console.step(f"Installing horovod_topk[{wanted}]")
    if variant.tensorflow:
        pip_install(environment, runner, "--no-deps", TF_KERAS)
    package = f"{environment.root}[{wanted}]"
    pip_install(environment, runner, package, f"horovod=={horovod.VERSION}", *pins(variant))
    remove = [environment.python, "-m", "pip", "uninstall", "--yes", *BUILD_PACKAGES]
    runner.check(remove, "what only a build needs cannot be removed")
    (packages,) = environment.path.glob("lib/python*/site-packages")
    for folder in HEADERS:
        shutil.rmtree(packages / folder, ignore_errors=True)
    verify(environment, runner, frameworks(variant))
