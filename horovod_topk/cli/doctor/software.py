"""Findings about Horovod, the frameworks, and whether they work together."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from horovod_topk.cli.doctor.finding import Finding, imported, is_installed, version

TESTED = "0.28.1"  # Horovod's last release
REBUILD = "build Horovod again with {flag}=1: `make setup` does it"
SERVED = ("torch", "tensorflow")
BACKENDS = ("gloo", "nccl", "mpi")  # backends of torch.distributed
TENSORFLOW = ("tensorflow", "tensorflow-cpu")  # some of TensorFlow's distribution names


@dataclass(frozen=True)
class Build:
    """The frameworks and controllers that the installed Horovod was built with."""

    frameworks: tuple[str, ...]  # frameworks that it was built for
    controllers: tuple[str, ...] = ()
    nccl: bool = False
    error: str = ""  # why it cannot be imported; empty: it can


def findings(build: Build | None) -> Iterator[Finding]:
    """Yield findings about Horovod and the frameworks."""
    yield horovod(version("horovod"), build, without=is_installed("torch"))
    if build is not None:
        yield controllers(build)
        yield nccl(build, gpu=_sees_gpu())
    yield framework("PyTorch", version("torch"), "torch", "HOROVOD_WITH_PYTORCH", build)
    yield data_parallel(backends := _backends())
    yield fsdp2(backends)
    found = version(*TENSORFLOW, module="tensorflow")
    yield framework("TensorFlow", found, "tensorflow", "HOROVOD_WITH_TENSORFLOW", build)
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "0") in ("1", "true", "True")
    yield keras(version("keras"), version("tf-keras", "tf_keras"), legacy=legacy)


def find_build() -> Build | None:
    """Return what the installed Horovod was built with; None if there is no Horovod.

    `horovodrun --check-build` starts a process for each framework, which takes a minute on a busy
    machine; importing one framework's part of Horovod gives the same facts.
    """
    spec = importlib.util.find_spec("horovod") if is_installed("horovod") else None
    if spec is None:
        return None
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    built = tuple(n for n in SERVED if any(any(f.glob(f"{n}/mpi_lib*.so")) for f in folders))
    usable = [name for name in built if is_installed(name)]
    if not usable:
        return Build(built, error="" if built else "it was built for neither framework")
    try:
        hvd = importlib.import_module(f"horovod.{usable[0]}")
    except (ImportError, OSError) as error:  # it was built for another version of the framework
        return Build(built, error=str(error).splitlines()[0])
    names = tuple(name for name in ("gloo", "mpi") if getattr(hvd, f"{name}_built")())
    return Build(built, names, bool(hvd.nccl_built()))


def horovod(found: str | None, build: Build | None, *, without: bool = False) -> Finding:
    """Report Horovod's version.

    without: whether a framework is installed that exchanges without it, by horovod_topk.ddp.
    """
    cure = "`make setup` builds it; pip alone does not, see README"
    if build is None and without:
        return Finding("Horovod", "not installed; horovod_topk.ddp needs none")
    if found is None or build is None:
        return Finding("Horovod", "not installed", cure)
    if build.error:
        return Finding("Horovod", f"{found}, which cannot be used: {build.error}", cure)
    if found != TESTED:
        return Finding("Horovod", f"{found}, not tested", f"{TESTED} is: {cure}")
    return Finding("Horovod", found)


def controllers(build: Build) -> Finding:
    """Report the controllers, through which ranks find each other."""
    if not build.controllers:
        cure = REBUILD.format(flag="HOROVOD_WITH_GLOO")
        return Finding("controllers", "none: ranks cannot find each other", cure)
    return Finding("controllers", ", ".join(build.controllers))


def nccl(build: Build, *, gpu: bool) -> Finding:
    """Report whether Horovod has NCCL, for collectives between GPUs."""
    if build.nccl:
        return Finding("NCCL", "built in")
    cure = "build Horovod again with HOROVOD_GPU_OPERATIONS=NCCL" if gpu else ""
    return Finding(
        "NCCL", "not built in" + (": GPUs exchange through the host" if gpu else ""), cure
    )


def framework(name: str, found: str | None, module: str, flag: str, build: Build | None) -> Finding:
    """Report a framework's version, and whether Horovod was built for it."""
    if found is None:
        return Finding(name, "not installed")
    if build is not None and module not in build.frameworks:
        state = f"{found}, which Horovod was not built for"
        return Finding(name, state, REBUILD.format(flag=flag))
    return Finding(name, found)


def data_parallel(backends: Sequence[str] | None) -> Finding:
    """Report the backends of torch DistributedDataParallel, which needs no Horovod."""
    if backends is None:
        return Finding("torch DDP", "not available")
    return Finding("torch DDP", f"horovod_topk.ddp, over {', '.join(backends)}")


def fsdp2(backends: Sequence[str] | None) -> Finding:
    """Report whether FSDP2 shards a model here, over a mesh of this process alone, with Gloo."""
    if "gloo" not in (backends or ()):
        return Finding("FSDP2", "not available")
    fully_shard = getattr(imported("torch.distributed.fsdp"), "fully_shard", None)
    if fully_shard is None:
        return Finding("FSDP2", "this PyTorch has no fully_shard", "pip install 'torch>=2.6'")
    torch, dist = map(importlib.import_module, ("torch", "torch.distributed"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(torch.nn.Linear(2, 2), mesh=mesh["shard"])
        model(torch.ones(1, 2)).sum().backward()
    except Exception as error:
        cure = "run docs/start.md's example of FSDP2, which says more; try another PyTorch"
        return Finding("FSDP2", f"fails: {str(error).splitlines()[0]}", cure)
    finally:
        dist.destroy_process_group()
    return Finding("FSDP2", "horovod_topk.fsdp, over a mesh with gloo")


def keras(found: str | None, legacy_found: str | None, *, legacy: bool) -> Finding:
    """Report Keras's version. Under Horovod's own optimizer Keras 3 exchanges no gradients."""
    if legacy:
        if legacy_found is None:
            cure = "pip install tf-keras, of TensorFlow's own version"
            return Finding("Keras", "TF_USE_LEGACY_KERAS=1 without tf-keras", cure)
        return Finding("Keras", f"tf-keras {legacy_found}, by TF_USE_LEGACY_KERAS=1")
    if found is None:
        return Finding("Keras", "not installed")
    if int(found.split(".")[0]) < 3:
        return Finding("Keras", found)
    return Finding(
        "Keras",
        f"{found}: Horovod's own DistributedOptimizer exchanges no gradients with Keras 3",
        "use horovod_topk.tensorflow.keras.DistributedOptimizer, or TF_USE_LEGACY_KERAS=1 with "
        "tf-keras" + ("" if legacy_found else " (pip install tf-keras)"),
    )


def _backends() -> list[str] | None:
    dist = imported("torch.distributed")
    if dist is None or not dist.is_available():
        return None
    return [name for name in BACKENDS if getattr(dist, f"is_{name}_available")()]


def _sees_gpu() -> bool:
    torch = imported("torch")
    return torch is not None and bool(torch.cuda.is_available())
